"""Where task rows lie and how each format is read: JSON Lines, Parquet, Hugging Face datasets on disk.

Every reader yields plain dicts and says where each stood, so that a bad row is named by file and line.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError

Record = dict[str, Any]
Version = tuple[str, int, int, str, str | None]
"""What changes when a task file does: path, size in bytes, time of change in nanoseconds, kind, split."""

BATCH_ROWS = 256
"""Rows of Parquet and Arrow that are Python objects at once."""

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
"""What counts as a shard in a folder. A single file of another suffix is read as JSON Lines."""

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}


@dataclass(frozen=True)
class TaskFile:
    """One file of rows.

    Attributes:
        path: Absolute path.
        kind: ``jsonl``, ``parquet`` or ``arrow`` (the stream or file format).
        split: The split it was written as; None where rows are yet to be split.
    """

    path: str
    kind: str
    split: str | None = None

    def version(self) -> Version:
        """The file as it is now."""
        stat = os.stat(self.path)
        return self.path, stat.st_size, stat.st_mtime_ns, self.kind, self.split


def find_files(source: str | os.PathLike[str]) -> list[TaskFile]:
    """The files of a task set, in the order of their rows.

    Args:
        source: A file; a glob; a folder of shards; or a folder written by ``save_to_disk`` of a ``Dataset`` or
            a ``DatasetDict``. Shards that are all named for splits (``train-00000-of-00002.parquet``), or lie in
            folders that are, keep these splits.

    Raises:
        DataError: Nothing is there, or it cannot be told which files are meant.
    """
    given = os.fspath(source)
    path = Path(given).expanduser()
    if path.is_dir():
        return _of_folder(path.resolve(), given)
    if path.exists():
        return [_task_file(path.resolve())]
    if glob.has_magic(given):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if not any(match.is_file() for match in matches):
            raise DataError(f"no file matches {given!r} (looked in {Path.cwd()}).")
        return _by_split_name([(match.resolve(), match.name) for match in matches if match.is_file()], given)
    raise DataError(f"there is no data file {given!r} (looked for {path.resolve()}).")


def _task_file(path: Path, split: str | None = None) -> TaskFile:
    if path.suffix in _PACKED:
        raise DataError(f"{path} is packed: rows in it cannot be reached one by one. Unpack it first.")
    return TaskFile(str(path), SUFFIXES.get(path.suffix, "jsonl"), split)


def _of_folder(folder: Path, given: str) -> list[TaskFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = _json_file(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise DataError(f"{folder / 'dataset_dict.json'} names no splits.")
        return [file for split in splits for file in _saved_dataset(folder / str(split), str(split))]
    if (folder / "state.json").is_file():
        return _saved_dataset(folder, None)
    shards = _shards(folder)
    if shards:
        return _by_split_name([(path, path.name) for path in shards], given)
    below = [
        (path, path.parent.name) for child in sorted(folder.iterdir()) if child.is_dir() for path in _shards(child)
    ]
    named = [(path, name) for path, name in below if _split_named(name)]
    if not named:
        raise DataError(
            f"{given!r} is a folder without task files: expected *.jsonl, *.parquet, or what `save_to_disk` of a "
            "Hugging Face dataset writes."
        )
    return _by_split_name(named, given)


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in SUFFIXES)


def _split_named(name: str) -> str | None:
    """The split that a file or folder is named for, by a word of its name; None for none, or several."""
    words = re.split(r"[-_. ]", name.lower())
    found = [split for split, spellings in _SPLITS.items() if any(word in spellings for word in words)]
    return found[0] if len(found) == 1 else None


def _by_split_name(shards: list[tuple[Path, str]], given: str) -> list[TaskFile]:
    """The shards with the splits their names say, when all say one and not all the same."""
    splits = [_split_named(name) for _, name in shards]
    if len(set(splits)) == 1:
        return [_task_file(path) for path, _ in shards]
    if None in splits:
        stray = next(path.name for (path, _), split in zip(shards, splits, strict=True) if split is None)
        raise DataError(
            f"{given!r} has files named for splits and others, such as {stray!r}: it is not clear what is held out. "
            "Give a glob that names fewer, such as 'FOLDER/train-*.parquet'."
        )
    pairs = zip(shards, splits, strict=True)
    return sorted((_task_file(path, split) for (path, _), split in pairs), key=lambda f: [*_SPLITS].index(f.split))


def _saved_dataset(folder: Path, split: str | None) -> list[TaskFile]:
    """The Arrow files of what ``Dataset.save_to_disk`` wrote, as its ``state.json`` lists them."""
    state = _json_file(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder} holds a selection of rows: save it again after `dataset.flatten_indices()`.")
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'} lists no data files: not a dataset of `save_to_disk`.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} is not whole: {missing[0]} is missing.")
    return [TaskFile(str(folder / name), "arrow", split) for name in names]


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Columns to read of Parquet and Arrow, so that the others stay on disk.

    Attributes:
        needed: Where one of these is missing everything is read, so that an error can say what there is.
        also: Read where they are there.
    """

    needed: tuple[str, ...]
    also: tuple[str, ...] = ()

    def of(self, names: Sequence[str]) -> list[str]:
        """What to read of a file that has columns ``names``."""
        if any(name not in names for name in self.needed):
            return list(names)
        return [name for name in names if name in self.needed or name in self.also]


def read_records(file: TaskFile, columns: Selection | None = None) -> Iterator[tuple[str, Record]]:
    """Every row of a file and where it stood.

    Args:
        file: One of :func:`find_files`.
        columns: Of Parquet and Arrow, only these; None for all.

    Raises:
        DataError: The file is not of its format; the text names the line where there are lines.
    """
    if file.kind == "jsonl":
        for number, (_, record) in enumerate(json_lines(file.path), start=1):
            if record is not None:
                yield f"{file.path}:{number}", record
        return
    number = 0
    for batch in arrow_batches(file, columns):
        for record in batch.to_pylist():
            number += 1
            yield f"{file.path}, row {number}", record


@dataclass(frozen=True)
class Line:
    """Where a line of a JSON Lines file lies, in bytes, without a byte order mark."""

    offset: int
    length: int


def json_lines(path: str, start: int = 0, end: int | None = None) -> Iterator[tuple[Line, Record | None]]:
    """The lines that begin in ``[start, end)``; None for a blank one.

    Raises:
        DataError: A line is not a JSON object, the text names file and line; or the file cannot be read.
    """
    offset = start
    try:
        with open(path, "rb") as stream:
            if start:
                stream.seek(start - 1)
                offset += len(stream.readline()) - 1  # the rest of a line that begins before
            while (end is None or offset < end) and (data := stream.readline()):
                mark = 3 if offset == 0 and data.startswith(b"\xef\xbb\xbf") else 0
                try:
                    record = parse_line(data[mark:])
                except ValueError as error:
                    raise DataError(f"{LinePlace(path, offset)}: {error}") from error
                yield Line(offset + mark, len(data) - mark), record
                offset += len(data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def parse_line(data: bytes) -> Record | None:
    """A line's JSON object, None for a blank line. Raises ValueError that says what is wrong."""
    try:
        text = data.decode("utf-8").strip()
        if not text:
            return None
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}.") from error
    except RecursionError as error:
        raise ValueError("nested too deeply.") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}.")
    return record


@dataclass(frozen=True)
class LinePlace:
    """The line that begins at a byte of a file; it is counted only when somebody wants to read it."""

    path: str
    offset: int

    def __str__(self) -> str:
        number, left = 1, self.offset
        with open(self.path, "rb") as stream:
            while left > 0 and (data := stream.read(min(left, 1 << 20))):
                number += data.count(b"\n")
                left -= len(data)
        return f"{self.path}:{number}"


def arrow_batches(
    file: TaskFile, columns: Selection | None = None, row_groups: Sequence[int] | None = None
) -> Iterator[Any]:
    """Record batches of at most :data:`BATCH_ROWS` rows of a Parquet or Arrow file.

    Args:
        row_groups: Of Parquet, only these; None for all.
    """
    pyarrow = require_pyarrow(file.path)
    try:
        if file.kind == "parquet":
            # Page by page: a row group may be larger than memory.
            with pyarrow.parquet.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as parquet:
                wanted = None if columns is None else columns.of(parquet.schema_arrow.names)
                groups = list(range(parquet.num_row_groups)) if row_groups is None else list(row_groups)
                if groups:
                    yield from parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, columns=wanted)
        else:
            yield from arrow_table(file.path, columns).to_batches(max_chunksize=BATCH_ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def arrow_table(path: str, columns: Selection | None = None) -> Any:
    """An Arrow file as a table over mapped memory: nothing of it is read before it is asked for."""
    pyarrow = require_pyarrow(path)
    try:
        source = pyarrow.memory_map(path)
        try:
            table = pyarrow.ipc.open_stream(source).read_all()  # what `save_to_disk` writes
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(source).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(TaskFile(path, "arrow"), error) from error
    return table if columns is None else table.select(columns.of(table.column_names))


def parquet_row_groups(file: TaskFile) -> list[int]:
    """Rows of each row group."""
    pyarrow = require_pyarrow(file.path)
    try:
        with pyarrow.parquet.ParquetFile(file.path) as parquet:
            return [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: TaskFile, error: Exception) -> DataError:
    name = {"parquet": "Parquet", "arrow": "Arrow"}[file.kind]
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"{file.path} is not a readable {name} file: {reason}")


def require_pyarrow(what: str) -> Any:
    """The package pyarrow with its Parquet part. Raises ConfigError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{what}: reading it needs the package pyarrow (pip install pyarrow).") from error
    return pyarrow
