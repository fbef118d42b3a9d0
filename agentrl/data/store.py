"""Every trajectory of a run, in Parquet: one file a step and set, written whole, readable by pandas and pyarrow.

``trajectories/train-000010.parquet`` holds the rollout of step 10, ``trajectories/eval-search-000010.parquet``
the held-out episodes after it. Token arrays are nested lists of numbers (a list of segments a row);
the other columns are the fields of a line of ``trajectories.jsonl``. The schema version is in the metadata.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.data.files import atomic_file, remove_partials, storage_errors
from agentrl.data.records import (
    COLUMNS,
    MESSAGE_FIELDS,
    SCHEMA_VERSION,
    SEGMENT_ARRAYS,
    TRAINED_ARRAYS,
    from_record,
    scalars,
)
from agentrl.errors import DataError
from agentrl.types import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP = 64
"""Trajectories that are turned into columns at once; bounds the memory of a write."""

_PART = re.compile(r"(?P<name>.+)-(?P<step>\d{6,})\.parquet")
_REPETITIVE = ["name", "env", "task_split", "agent", "stop_reason", "outcome"]
_VERSION_KEY = b"agentrl.schema_version"


@dataclass(frozen=True)
class Part:
    """One stored file: the trajectories of set ``name`` at ``step``."""

    path: Path
    name: str
    step: int


def arrow_schema() -> pa.Schema:
    """Columns of a part. Array dtypes are those of :class:`agentrl.types.Segment`."""
    import pyarrow as pa

    segment = pa.struct(
        [
            *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in SEGMENT_ARRAYS.items()),
            ("prompt_length", pa.int32()),
        ]
    )
    nested = {
        "doubles": pa.list_(pa.float64()),
        "messages": pa.list_(pa.struct([(field, pa.string()) for field in MESSAGE_FIELDS])),
    }
    kinds = {
        "step": pa.int64(),
        "name": pa.string(),
        **{name: nested.get(kind) or pa.type_for_alias(kind) for name, (kind, _) in COLUMNS.items()},
        "advantage": pa.float64(),
        "segments": pa.list_(segment),
        "trained": pa.list_(pa.struct([(name, pa.list_(pa.float32())) for name in TRAINED_ARRAYS])),
    }
    return pa.schema(list(kinds.items()), metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def _batch(trajectories: Sequence[Trajectory], step: int, name: str, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    rows = [
        {"step": step, "name": name, "advantage": t.advantage, **scalars(t)}
        | {"segments": [{field: getattr(s, field) for field in (*SEGMENT_ARRAYS, "prompt_length")} for s in t.segments]}
        | {"trained": [s.trained for s in t.segments] if any(s.trained for s in t.segments) else None}
        for t in trajectories
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array([row[column.name] for row in rows], column.type) for column in schema], schema=schema
    )


class TrajectoryStore:
    """The trajectories of a run, part by part. Parts are never changed; a step that is done again replaces its part.
    ``read_only`` leaves the folder as it is: a run that is going on may be writing it."""

    def __init__(self, folder: Path | str, *, read_only: bool = False):
        self.folder = Path(folder)
        if read_only:
            return
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_partials(self.folder)

    def part_path(self, name: str, step: int) -> Path:
        """Where the part of set ``name`` at ``step`` lies."""
        return self.folder / f"{name}-{step:06d}.parquet"

    def write(self, step: int, trajectories: Iterable[Trajectory], *, name: str = "train") -> Path:
        """Store the trajectories of one step, atomically, in place of the part that is there.

        Args:
            step: Rollout the weights of which sampled them.
            trajectories: All of the step; an iterator is consumed in pieces of ``ROW_GROUP``.
            name: The set: ``train``, or ``eval-<set>``. Letters, digits, ``-``, ``_`` and ``.``.

        Raises:
            StorageError: Disk full or folder not writable; no part is left half-written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not re.fullmatch(r"[\w.-]+", name):
            raise DataError(f"A set of trajectories cannot be called {name!r}: letters, digits, '-', '_' and '.' only.")
        schema, path = arrow_schema(), self.part_path(name, step)
        with (
            atomic_file(path) as stream,
            pq.ParquetWriter(
                pa.PythonFile(stream, mode="w"),
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=_REPETITIVE,
            ) as writer,
        ):
            rest = iter(trajectories)
            while chunk := list(itertools.islice(rest, ROW_GROUP)):
                writer.write_batch(_batch(chunk, step, name, schema))
        return path

    def parts(self, name: str | None = None) -> list[Part]:
        """Stored parts (of set ``name``), by set and step."""
        found = []
        for path in self.folder.glob("*.parquet"):
            match = _PART.fullmatch(path.name)
            if match and name in (None, match["name"]):
                found.append(Part(path, match["name"], int(match["step"])))
        return sorted(found, key=lambda part: (part.name, part.step))

    def table(self, name: str | None = None, *, step: int | None = None, columns: list[str] | None = None) -> pa.Table:
        """The stored rows as one Arrow table; ask for ``columns`` without ``segments`` to leave tokens on disk.
        Raises DataError: a file is torn or of a newer schema version."""
        import pyarrow as pa

        tables = [_read(part.path, columns) for part in self.parts(name) if step in (None, part.step)]
        if not tables:
            empty = arrow_schema().empty_table()
            return empty.select(columns) if columns else empty
        return pa.concat_tables(tables, promote_options="default")

    def read(self, name: str | None = None, *, step: int | None = None, segments: bool = True) -> Iterator[Trajectory]:
        """The stored trajectories, one at a time; without ``segments`` tokens are left on disk.

        Raises DataError as :meth:`table` does.
        """
        for part in self.parts(name):
            if step in (None, part.step):
                yield from _trajectories(part.path, segments)

    def rewind(self, step: int) -> int:
        """Forget what came after ``step``, when a run goes on from an older checkpoint; returns the number of parts.

        A part of training of step s is of the weights after s rollouts, so s itself is done again.
        """
        of_training = [part for part in self.parts() if not part.name.startswith("eval-")]
        gone = [part for part in self.parts() if part.step > step]
        gone += [part for part in of_training if part.step == step]
        for part in gone:
            with storage_errors(part.path):
                part.path.unlink(missing_ok=True)
        return len(gone)


def _open(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable part (torn or no Parquet): {error}") from None
    version = int((file.schema_arrow.metadata or {}).get(_VERSION_KEY, b"0"))
    if not 1 <= version <= SCHEMA_VERSION:
        raise DataError(f"{path}: schema version {version}, this agentrl reads up to {SCHEMA_VERSION}: update it.")
    return file


def _read(path: Path, columns: list[str] | None) -> pa.Table:
    with _open(path) as file:
        return file.read(columns=columns)


def _trajectories(path: Path, segments: bool) -> Iterator[Trajectory]:
    with _open(path) as file:
        plain = [name for name in file.schema_arrow.names if name not in ("segments", "trained")]
        arrays = [name for name in file.schema_arrow.names if segments and name not in plain]
        for batch in file.iter_batches(batch_size=ROW_GROUP, columns=[*plain, *arrays]):
            for place, row in enumerate(batch.select(plain).to_pylist()):
                if segments:
                    row["segments"] = [_numbers(segment) for segment in batch.column("segments")[place]]
                    trained = batch.column("trained")[place] if "trained" in arrays else None  # younger than some parts
                    if trained is not None and trained.is_valid:
                        for segment, kept in zip(row["segments"], trained, strict=True):
                            segment["trained"] = _numbers(kept)
                yield from_record(row, segments=segments)


def _numbers(struct: pa.StructScalar) -> dict[str, Any]:
    """A struct of lists and numbers, the lists as arrays: no Python object for each token."""
    return {
        name: value.as_py() if not hasattr(value, "values") or value.values is None else value.values.to_numpy().copy()
        for name, value in struct.items()
    }
