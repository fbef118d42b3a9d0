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

import numpy as np

from agentrl.data.files import atomic_file, remove_partials, storage_errors
from agentrl.data.records import (
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
    kinds: dict[str, Any] = {
        "step": pa.int64(),
        "name": pa.string(),
        "trajectory_id": pa.string(),
        "group_id": pa.string(),
        "task_id": pa.string(),
        "env": pa.string(),
        "task_split": pa.string(),
        "task_seed": pa.int64(),
        "task_options": pa.string(),
        "agent": pa.string(),
        "reward": pa.float64(),
        "rewards": pa.string(),
        "turn_rewards": pa.list_(pa.float64()),
        "advantage": pa.float64(),
        "success": pa.bool_(),
        "stop_reason": pa.string(),
        "outcome": pa.string(),
        "error": pa.string(),
        "num_turns": pa.int32(),
        "num_tokens": pa.int64(),
        "num_sampled": pa.int64(),
        "messages": pa.list_(pa.struct([(field, pa.string()) for field in MESSAGE_FIELDS])),
        "tool_calls": pa.string(),
        "info": pa.string(),
        "timings": pa.string(),
        "segments": pa.list_(segment),
        "trained": pa.list_(pa.struct([(name, pa.list_(pa.float32())) for name in TRAINED_ARRAYS])),
    }
    return pa.schema(list(kinds.items()), metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def _list_column(arrays: Sequence[np.ndarray], dtype: Any) -> pa.Array:
    """A list column over ``arrays``: one copy of the numbers, none per element."""
    import pyarrow as pa

    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    values = np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _segments_column(trajectories: Sequence[Trajectory]) -> pa.Array:
    import pyarrow as pa

    segments = [s for t in trajectories for s in t.segments]
    columns = [_list_column([getattr(s, name) for s in segments], dtype) for name, dtype in SEGMENT_ARRAYS.items()]
    columns.append(pa.array([s.prompt_length for s in segments], pa.int32()))
    return _of_trajectories(trajectories, pa.StructArray.from_arrays(columns, names=[*SEGMENT_ARRAYS, "prompt_length"]))


def _trained_column(trajectories: Sequence[Trajectory], kind: pa.DataType) -> pa.Array:
    """What each segment was trained with; null where nothing was kept."""
    import pyarrow as pa

    segments = [s for t in trajectories for s in t.segments]
    if not any(s.trained for s in segments):
        return pa.nulls(len(trajectories), kind)
    columns = [pa.array([s.trained.get(name) for s in segments], pa.list_(pa.float32())) for name in TRAINED_ARRAYS]
    return _of_trajectories(trajectories, pa.StructArray.from_arrays(columns, names=list(TRAINED_ARRAYS)))


def _of_trajectories(trajectories: Sequence[Trajectory], flat: pa.Array) -> pa.Array:
    import pyarrow as pa

    offsets = np.zeros(len(trajectories) + 1, dtype=np.int32)
    np.cumsum([len(t.segments) for t in trajectories], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def _batch(trajectories: Sequence[Trajectory], step: int, name: str, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    rows = [scalars(t) for t in trajectories]
    arrays = []
    for column in schema:
        if column.name == "segments":
            arrays.append(_segments_column(trajectories).cast(column.type))
            continue
        if column.name == "trained":
            arrays.append(_trained_column(trajectories, column.type))
            continue
        if column.name in ("step", "name"):
            values: list[Any] = [step if column.name == "step" else name] * len(rows)
        elif column.name == "advantage":
            values = [t.advantage for t in trajectories]
        else:
            values = [row[column.name] for row in rows]
        arrays.append(pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class TrajectoryStore:
    """The trajectories of a run, part by part. Parts are never changed; a step that is done again replaces its part.

    Args:
        folder: where they are.
        read_only: leave the folder as it is: a run that is going on may be writing it.
    """

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

        Raises:
            DataError: A file is torn or of a newer schema version.
        """
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

        A training part of step s was sampled by the weights after s rollouts, so s itself is done again.
        """
        gone = [part for part in self.parts() if part.step > step or (part.step == step and part.name == "train")]
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
        if not segments:
            columns = [name for name in file.schema_arrow.names if name not in ("segments", "trained")]
            for batch in file.iter_batches(batch_size=ROW_GROUP, columns=columns):
                yield from (from_record(row, segments=False) for row in batch.to_pylist())
            return
        for batch in file.iter_batches(batch_size=ROW_GROUP):
            rows = batch.drop_columns(["segments"]).to_pylist()
            for row in rows:
                row["trained"] = row.get("trained") or []  # null, or a part of before there was such a column
            column = batch.column("segments")
            flat, ends = column.flatten(), column.offsets.to_numpy() - column.offsets[0].as_py()
            arrays = {name: flat.field(name) for name in SEGMENT_ARRAYS}
            lengths = flat.field("prompt_length").to_pylist()
            for row, first, last in zip(rows, ends[:-1], ends[1:], strict=True):
                row["segments"] = [
                    {
                        **{name: np.array(values[i].values) for name, values in arrays.items()},
                        "prompt_length": lengths[i],
                        "trained": row["trained"][i - first] if row["trained"] else None,
                    }
                    for i in range(first, last)
                ]
                yield from_record(row)
