"""Where task rows lie and how they are read: JSON Lines by hand, Parquet and Arrow by pyarrow.

JSON Lines are not read by `datasets` or pyarrow: these give a column one type, so that an answer "2020-01-01" would
become a date and 1 beside 0.5 a 1.0, and with it another task. Nor does a plain file need more than Python then.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DataError
from agentrl.jsonl import Place, Record, json_lines, read_json
from agentrl.versions import imported

Choose = Callable[[list[str]], list[str]]
"""Of the columns that a Parquet or Arrow file has, those that are read."""
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
    """A file of rows: its absolute path; ``jsonl``, ``parquet`` or ``arrow``; the split it was written as, if any."""

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
    if not glob.has_magic(given):
        raise DataError(f"there is no data file {given!r} (looked for {path.resolve()}).")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise DataError(f"no file matches {given!r} (looked in {Path.cwd()}).")
    return _by_split_name([(match.resolve(), match.name) for match in matches], given)


def _task_file(path: Path, split: str | None = None) -> TaskFile:
    if path.suffix in _PACKED:
        raise DataError(f"{path} is packed: rows in it cannot be reached one by one. Unpack it first.")
    return TaskFile(str(path), SUFFIXES.get(path.suffix, "jsonl"), split)


def _of_folder(folder: Path, given: str) -> list[TaskFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = _saved_value(folder / "dataset_dict.json", "splits")
        return [file for split in splits for file in _saved_dataset(folder / str(split), str(split))]
    if (folder / "state.json").is_file():
        return _saved_dataset(folder, None)
    if shards := _shards(folder):
        return _by_split_name([(path, path.name) for path in shards], given)
    below = [(path, child.name) for child in sorted(folder.iterdir()) if child.is_dir() for path in _shards(child)]
    if named := [(path, name) for path, name in below if _split_named(name)]:
        return _by_split_name(named, given)
    raise DataError(
        f"{given!r} is a folder without task files: expected *.jsonl, *.parquet, or what `save_to_disk` of a "
        "Hugging Face dataset writes."
    )


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in SUFFIXES)


def _split_named(name: str) -> str | None:
    """The split that a file or folder is named for, by a word of its name; None for none, or several."""
    words = re.split(r"[-_. ]", name.lower())
    found = [split for split, spellings in _SPLITS.items() if any(word in spellings for word in words)]
    return found[0] if len(found) == 1 else None


def _by_split_name(shards: list[tuple[Path, str]], given: str) -> list[TaskFile]:
    """The shards with the splits their names say, when all say one and not all the same."""
    files = [_task_file(path, _split_named(name)) for path, name in shards]
    splits = {file.split for file in files}
    if len(splits) == 1:
        return [TaskFile(file.path, file.kind) for file in files]
    if None in splits:
        stray = next(Path(file.path).name for file in files if file.split is None)
        raise DataError(
            f"{given!r} has files named for splits and others, such as {stray!r}: it is not clear what is held out. "
            "Give a glob that names fewer, such as 'FOLDER/train-*.parquet'."
        )
    return sorted(files, key=lambda file: [*_SPLITS].index(str(file.split)))


def _saved_dataset(folder: Path, split: str | None) -> list[TaskFile]:
    """The Arrow files of what ``Dataset.save_to_disk`` wrote, as its ``state.json`` lists them."""
    names = [str(entry["filename"]) for entry in _saved_value(folder / "state.json", "_data_files")]
    if _saved_value(folder / "state.json", "_indices_data_files", []):
        raise DataError(f"{folder} holds a selection of rows: save it again after `dataset.flatten_indices()`.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} is not whole: {missing[0]} is missing.")
    return [TaskFile(str(folder / name), "arrow", split) for name in names]


def _saved_value(path: Path, key: str, default: list[Any] | None = None) -> list[Any]:
    value = read_json(path).get(key, default)
    if not isinstance(value, list):
        raise DataError(f"{path} has no list {key!r}: not what `save_to_disk` of a Hugging Face dataset writes.")
    return value


# -- reading ---------------------------------------------------------------------------------------


def read_records(file: TaskFile, choose: Choose = list) -> Iterator[tuple[Place, Record]]:
    """Every row of a file and where it stood.
    Raises DataError: the file is not of its format; the text names the line where there are lines."""
    if file.kind == "jsonl":
        yield from ((place, record) for place, _, record in json_lines(file.path))
        return
    pyarrow = imported("pyarrow.parquet", f"reading {file.path}", "data")
    try:
        if file.kind == "arrow":
            batches = arrow_table(file.path, choose).to_batches(max_chunksize=BATCH_ROWS)
        else:  # page by page: a row group may be larger than memory
            parquet = pyarrow.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False)
            batches = parquet.iter_batches(BATCH_ROWS, columns=choose(parquet.schema_arrow.names))
        number = 0
        for batch in batches:
            for record in batch.to_pylist():
                yield Place(file.path, number), record
                number += 1
    except (OSError, ValueError) as error:  # also pyarrow's own
        raise unreadable(file, error) from error


def arrow_table(path: str, choose: Choose = list) -> Any:
    """An Arrow file as a table over mapped memory: nothing of it is read before it is asked for."""
    pyarrow = imported("pyarrow", f"reading {path}", "data")
    try:
        source = pyarrow.memory_map(path)
        try:
            table = pyarrow.ipc.open_stream(source).read_all()  # what `save_to_disk` writes
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(source).read_all()
    except (OSError, ValueError) as error:
        raise unreadable(TaskFile(path, "arrow"), error) from error
    return table.select(choose(table.column_names))


def unreadable(file: TaskFile, error: BaseException) -> DataError:
    """What to raise for a table that cannot be read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"{file.path} is not a readable {file.kind.capitalize()} file: {reason}")
