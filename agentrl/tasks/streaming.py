"""Task rows that stay on disk: a mapped index says where each lies, and a row is read when it is asked for.

Ids, splits and order are those of rows in memory. The index is kept in a cache folder, under a name made of paths,
sizes and times of change of the files, so one that does not fit any more is never found. It is written beside and
renamed, so a torn one is never found either. Each row read is compared with its hash in the index.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

import numpy as np

from agentrl.errors import DataError, StorageError
from agentrl.tasks.dataset import Columns, Row, TaskRows, fingerprint, task_id
from agentrl.tasks.files import LinePlace, Record, TaskFile, Version, arrow_table, parse_line
from agentrl.tasks.index_build import FORMAT, KIND, build, checksum
from agentrl.tasks.indexing import ENTRY, Shard

log = logging.getLogger(__name__)

_ABANDONED_SECONDS = 86_400.0
_NAME = re.compile(r"[0-9a-f]{32}")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}-\d+-\w+\.partial")


class StreamedRows(Sequence[Row]):
    """Rows of an index, all or some of them. Reading one is thread-safe."""

    listed = True
    """They are rows that somebody wrote down, so content names them, not their number."""

    def __init__(self, index: TaskIndex, numbers: np.ndarray | range) -> None:
        self._index = index
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> StreamedRows: ...
    def __getitem__(self, place: int | slice) -> Row | StreamedRows:
        if isinstance(place, slice):
            return StreamedRows(self._index, self._numbers[place])
        return self._index.row(int(self._numbers[place]))

    def choose(self, places: np.ndarray) -> StreamedRows:
        """The rows at these places."""
        if isinstance(self._numbers, range):
            first, step = self._numbers.start, self._numbers.step
            return StreamedRows(self._index, first + step * places)
        return StreamedRows(self._index, self._numbers[places])

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._index.folder), self._index.columns, self._numbers)

    def __repr__(self) -> str:
        return f"<{len(self)} rows on disk>"


class TaskIndex:
    """An index in a folder, opened for reading.

    Args:
        folder: What :func:`agentrl.tasks.index_build.build` made.
        columns: As it was made with.

    Raises:
        DataError: The folder holds no whole index.
    """

    def __init__(self, folder: Path, columns: Columns) -> None:
        self.folder, self.columns = folder, columns
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            if (manifest["kind"], manifest["format"]) != (KIND, FORMAT):
                raise ValueError(f"{manifest['kind']}, format {manifest['format']}")
            self.shards = [Shard(**shard) for shard in manifest["shards"]]
            self.parts = {name: (first, end) for name, (first, end) in manifest["parts"].items()}
            self.answered, self.chats = int(manifest["answered"]), int(manifest["chats"])
            for name, size in manifest["sizes"].items():
                if os.path.getsize(folder / name) != size:
                    raise ValueError(f"{name} is cut short")
            self.entries = np.memmap(folder / "index.bin", ENTRY, "r", shape=(manifest["rows"],))
            if checksum(self.entries) != manifest["checksum"]:
                raise ValueError("index.bin is damaged")
            # Copies are opened now: another process may replace this index while it is in use.
            copies = [i for i, shard in enumerate(self.shards) if shard.copy_of and shard.path in manifest["sizes"]]
            self._tables = {i: arrow_table(str(folder / self.shards[i].path)) for i in copies}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder} holds no whole index of task data: {error}") from error

    def row(self, number: int) -> Row:
        """The row with this number, counted from 0.

        Raises:
            DataError: The file is not what it was when the index was made.
        """
        entry = self.entries[number]
        shard = self.shards[entry["shard"]]
        offset = int(entry["offset"])
        where: object = LinePlace(shard.path, offset)
        if shard.kind != "jsonl":
            where = f"{shard.copy_of or shard.path}, row {shard.first_row + offset + 1}"
        record = self._line(shard, entry) if shard.kind == "jsonl" else self._record(int(entry["shard"]), offset)
        row = self.columns.row(record, where)
        digest = int(entry["digest"])
        if fingerprint(row)[0] != digest:
            raise _changed(shard)
        row["task_id"] = task_id(row, digest, int(entry["copy"]))
        return row

    def _line(self, shard: Shard, entry: Any) -> Record:
        with open(shard.path, "rb") as stream:
            stat = os.fstat(stream.fileno())
            if (stat.st_size, stat.st_mtime_ns) != (shard.size, shard.mtime_ns):
                raise _changed(shard)
            data = os.pread(stream.fileno(), int(entry["length"]), int(entry["offset"]))
        try:
            record = parse_line(data)
        except ValueError as error:
            raise _changed(shard) from error
        if record is None:
            raise _changed(shard)
        return record

    def _record(self, number: int, offset: int) -> Record:
        table = self._tables.get(number)
        if table is None:
            shard = self.shards[number]
            stat = os.stat(shard.path)
            if (stat.st_size, stat.st_mtime_ns) != (shard.size, shard.mtime_ns):
                raise _changed(shard)
            table = self._tables[number] = arrow_table(shard.path, self.columns.selection())
        return table.slice(offset, 1).to_pylist()[0]

    def all_rows(self) -> TaskRows:
        """Everything, ready to be split."""
        rows = StreamedRows(self, range(len(self.entries)))
        digests, buckets = self.entries["digest"], self.entries["bucket"]
        return TaskRows(rows, digests, buckets, self.parts, self.answered, self.chats)


def _changed(shard: Shard) -> DataError:
    return DataError(
        f"{shard.copy_of or shard.path} is not what it was when this process opened it: task data must not change "
        "while it is used. Start again."
    )


def _reopen(folder: str, columns: Columns, numbers: np.ndarray | range) -> StreamedRows:
    return StreamedRows(TaskIndex(Path(folder), columns), numbers)


# -- opening ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def open_files(versions: tuple[Version, ...], columns: Columns, workers: int, cache_dir: str | None) -> TaskRows:
    """The rows of files, by an index in the cache or a new one.

    Args:
        versions: The files as they are now, in order.
        columns: Which columns become which entries.
        workers: Processes that make the index.
        cache_dir: Where indexes are kept; None for the user's cache folder, or, where that cannot be written, a
            temporary folder that goes with this process.

    Raises:
        DataError: A row is wrong; the text names file and line.
        StorageError: ``cache_dir`` cannot be written.
    """
    name = hashlib.sha256(json.dumps([FORMAT, versions, asdict(columns)]).encode()).hexdigest()[:32]
    root = _cache_root(cache_dir)
    folder = root / name
    if folder.exists():
        with contextlib.suppress(DataError):  # not whole: made again below
            return TaskIndex(folder, columns).all_rows()
        shutil.rmtree(folder, ignore_errors=True)
    with _storage_errors(root):
        build(folder, versions, columns, workers)
        _sweep(root)
    return TaskIndex(folder, columns).all_rows()


def spool(records: Iterable[tuple[str | None, str, Record]], columns: Columns, workers: int) -> TaskRows:
    """Rows of a function: written to a temporary folder that goes with this process, and indexed there.

    Raises:
        DataError: A row is wrong or cannot be written as JSON; the text says which.
    """
    root = _temporary()
    files: dict[str | None, Any] = {}
    with _storage_errors(root), contextlib.ExitStack() as stack:
        for split, where, record in records:
            if split not in files:
                files[split] = stack.enter_context((root / f"{split or 'rows'}.jsonl").open("w", encoding="ascii"))
            columns.row(record, where)  # said here, where it is known which row of the function it is
            try:
                files[split].write(json.dumps(record) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: streamed rows must be JSON: {error}.") from error
    if not files:
        raise DataError("the task function yields no rows.")
    versions = tuple(TaskFile(stream.name, "jsonl", split).version() for split, stream in files.items())
    return open_files(versions, columns, workers, str(root))


def _cache_root(given: str | None) -> Path:
    if given is not None:
        root = Path(given)
        with _storage_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        return root
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(base) / "agentrl" / "tasks"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        log.info("%s cannot be written (%s): the index of the task data goes into a temporary folder", root, error)
        return _temporary()


def _temporary() -> Path:
    """A folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="agentrl-tasks-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


@contextlib.contextmanager
def _storage_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the index of the task data cannot be written to {root}: {error.strerror or error}. Free some space, or "
            "choose another folder (cache_dir, or the environment variable XDG_CACHE_HOME)."
        ) from error


def _sweep(root: Path) -> None:
    """Removes indexes whose files are not what they were, and what killed processes left. Nothing else."""
    for path in root.iterdir():
        if _PARTIAL.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        elif _NAME.fullmatch(path.name) and _outdated(path / "manifest.json"):
            shutil.rmtree(path, ignore_errors=True)


def _outdated(manifest: Path) -> bool:
    """Whether this is an index of ours, and a file of it is gone or not what it was."""
    try:
        values = json.loads(manifest.read_text(encoding="utf-8"))
        if values["kind"] != KIND:
            return False
        shards = [Shard(**shard) for shard in values["shards"]]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    try:
        stats = [os.stat(shard.copy_of or shard.path) for shard in shards]
    except OSError:
        return True
    return any((s.st_size, s.st_mtime_ns) != (f.size, f.mtime_ns) for s, f in zip(stats, shards, strict=True))
