"""Task rows that stay on disk: an index says where each lies, and a row is read when it is asked for.

Ids, splits and order are those of rows in memory. The index is made by the package `datasets`: in several
processes, whole or not at all, and mapped. Parquet cannot be read row by row, so its rows are written once more, as
Arrow, beside the index. Each row read is compared with its hash in the index.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

import numpy as np

from agentrl.errors import AgentRLError, DataError, StorageError
from agentrl.jsonl import Place, Record, json_lines, parse_line
from agentrl.processes.warden import SCRATCH_ENV
from agentrl.tasks.dataset import Columns, Row, TaskRows, copy_numbers, fingerprint, task_id
from agentrl.tasks.files import BATCH_ROWS, TaskFile, Version, arrow_table, unreadable
from agentrl.versions import imported

log = logging.getLogger(__name__)

FORMAT = 1
LEAST_BYTES = 1 << 20
"""No process gets a smaller piece of a file."""
_ENTRY = {
    "file": "uint32", "place": "uint64", "length": "uint32", "digest": "int64", "bucket": "uint32",
    "answered": "bool", "chat": "bool", "error": "string",
}  # fmt: skip
_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that go with this process."""

Piece = tuple[int, Version, int, int]
"""A part of a task file: the file's number, the file, and the first byte or row and one past the last."""


class StreamedRows(Sequence[Row]):
    """Rows of an index, all or some of them. Reading one is thread-safe."""

    listed = True
    """They are rows that somebody wrote down, so content names them, not their number."""

    def __init__(self, index: TaskIndex, numbers: np.ndarray | range) -> None:
        self._index, self._numbers = index, numbers

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
        of = self._numbers
        return StreamedRows(self._index, of.start + of.step * places if isinstance(of, range) else of[places])

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._index.source, self._numbers)

    def __repr__(self) -> str:
        return f"<{len(self)} rows on disk>"


def _reopened(source: tuple[Any, ...], numbers: np.ndarray | range) -> StreamedRows:
    return StreamedRows(open_files(*source).rows._index, numbers)  # type: ignore[attr-defined]


class TaskIndex:
    """The index of task files in a folder, made where it is not there yet. Arguments as of :func:`open_files`."""

    source: tuple[Any, ...]
    """Arguments by which another process opens the same."""

    def __init__(self, folder: Path, versions: tuple[Version, ...], columns: Columns, workers: int) -> None:
        datasets = imported("datasets", f"reading {versions[0][0]}", "data")
        datasets.disable_progress_bars()
        self.versions, self.columns = versions, columns
        self.tables = [None if v[3] == "jsonl" else _table(v, columns, folder) for v in versions]
        pieces = list(_pieces(versions, self.tables, workers))
        if all(next(_located(*piece[1:], columns, folder), None) is None for piece in pieces):
            raise DataError(f"{', '.join(version[0] for version in versions)[:200]} holds no rows.")
        # Children that it forks collect no garbage of this process: destructors may wait for threads they do not have.
        gc.freeze()
        try:
            index = datasets.Dataset.from_generator(
                _entries,
                features=datasets.Features({name: datasets.Value(kind) for name, kind in _ENTRY.items()}),
                gen_kwargs={"pieces": pieces, "columns": columns, "folder": folder},
                cache_dir=str(folder),
                fingerprint="index",  # the folder's name says what it is of
                num_proc=min(workers, len(pieces)) if workers > 1 else None,
                writer_batch_size=4096,
            )
        finally:
            gc.unfreeze()
        self.entries = index.data
        if wrong := self.entries.column("error").drop_null().to_pylist():
            raise DataError(wrong[0])
        changed = [v for v in versions if _file(v).version() != v]
        if changed:
            raise DataError(f"{changed[0][0]} was changed while it was indexed. Start again when it is whole.")
        self.digests = self.entries.column("digest").to_numpy().view(np.uint64)
        self.copies = copy_numbers(self.digests)

    def row(self, number: int) -> Row:
        """The row with this number, counted from 0. Raises DataError: it is not what it was when the index was made."""
        entry = self.entries.fast_slice(number, 1).to_pylist()[0]
        digest = int(self.digests[number])
        path, _, _, kind, _ = self.versions[entry["file"]]
        place = Place(path, entry["place"], kind == "jsonl")
        try:
            if kind == "jsonl":
                with open(path, "rb") as stream:
                    record = parse_line(os.pread(stream.fileno(), entry["length"], entry["place"]), place)
            else:
                record = self.tables[entry["file"]].slice(entry["place"], 1).to_pylist()[0]
            row = self.columns.row(record, place)
        except (DataError, OSError):
            row = None
        if row is None or fingerprint(row)[0] != digest:
            raise DataError(
                f"{place} is not what it was when this process opened it: task data must not change while it is used. "
                "Start again."
            )
        row["task_id"] = task_id(row, digest, int(self.copies[number]))
        return row


def _table(version: Version, columns: Columns, folder: Path) -> Any:
    """Rows of Arrow or Parquet as a table over mapped memory."""
    path, _, _, kind, _ = version
    if kind == "arrow":
        return arrow_table(path, columns.choose)
    pyarrow, copy = imported("pyarrow", f"reading {path}", "data"), folder / f"{_name(path)}.arrow"
    if not copy.exists():
        partial, pool = copy.with_suffix(f".{os.getpid()}.partial"), pyarrow.default_memory_pool()
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others keep for long what was freed
        try:
            source = imported("pyarrow.parquet", f"reading {path}", "data").ParquetFile(
                path, buffer_size=1 << 20, pre_buffer=False
            )
            names = columns.choose(source.schema_arrow.names)
            schema = pyarrow.schema([source.schema_arrow.field(name) for name in names])
            folder.mkdir(parents=True, exist_ok=True)
            with pyarrow.ipc.new_stream(str(partial), schema) as writer:
                for batch in source.iter_batches(BATCH_ROWS, columns=names):
                    writer.write_batch(batch)
        except ValueError as error:  # pyarrow's own are such, a full disk is none
            raise unreadable(_file(version), error) from error
        finally:
            pyarrow.set_memory_pool(pool)
        os.replace(partial, copy)
    return arrow_table(str(copy))


def _file(version: Version) -> TaskFile:
    return TaskFile(version[0], version[3], version[4])


def _pieces(versions: Sequence[Version], tables: Sequence[Any], workers: int) -> Iterator[Piece]:
    """The files cut into a few pieces for each worker, in the order of the rows."""
    size = max(LEAST_BYTES, sum(version[1] for version in versions) // (4 * workers))
    for number, (version, table) in enumerate(zip(versions, tables, strict=True)):
        length = version[1] if table is None else table.num_rows
        step = max(1, -(-length // (1 + version[1] // size)))
        for start in range(0, length, step):
            yield number, version, start, min(length, start + step)


def _entries(pieces: list[Piece], columns: Columns, folder: Path) -> Iterator[dict[str, Any]]:
    """The entries of some pieces. An error is one too: exceptions lose their words between processes."""
    for file, version, start, end in pieces:
        try:
            for place, length, record in _located(version, start, end, columns, folder):
                row = columns.row(record, place)
                digest, bucket = fingerprint(row)
                answered, chat = row["answer"] is not None, not isinstance(row["prompt"], str)
                signed = digest - (digest >> 63 << 64)  # pyarrow takes Python's numbers as int64
                values = (file, place.number, length, signed, bucket, answered, chat, None)
                yield dict(zip(_ENTRY, values, strict=True))
        except DataError as error:
            yield dict(zip(_ENTRY, (file, 0, 0, 0, 0, False, False, str(error)), strict=True))
            return


def _located(
    version: Version, start: int, end: int, columns: Columns, folder: Path
) -> Iterator[tuple[Place, int, Record]]:
    if version[3] == "jsonl":
        yield from json_lines(version[0], start, end)
        return
    table = _table(version, columns, folder)
    for first in range(start, end, BATCH_ROWS):
        for number, record in enumerate(table.slice(first, min(BATCH_ROWS, end - first)).to_pylist(), start=first):
            yield Place(version[0], number), 0, record


# -- opening ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def open_files(versions: tuple[Version, ...], columns: Columns, workers: int, cache_dir: str | None) -> TaskRows:
    """The rows of files as they are now, in order, by an index in ``cache_dir`` or a new one. None is the user's cache
    folder, or, where that cannot be written, a temporary folder that goes with this process.
    Raises DataError: a row is wrong; the text names file and line.
    Raises StorageError: ``cache_dir`` cannot be written."""
    root = _cache_root(cache_dir)
    name = _name([FORMAT, [version[0] for version in versions], asdict(columns)])
    folder = root / f"{name}-{_name(versions)}"
    for again in (folder.exists(), False):  # a damaged one is made again
        try:
            index = TaskIndex(folder, versions, columns, workers)
            break
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not again:
                raise error if isinstance(error, AgentRLError) else _not_made(root, error) from error
    for outdated in root.glob(f"{name}-*"):  # of the same files, as they were
        if outdated != folder:
            shutil.rmtree(outdated, ignore_errors=True)
    index.source = versions, columns, workers, cache_dir
    column = {name: index.entries.column(name).to_numpy() for name in ("file", "bucket", "answered", "chat")}
    parts: dict[str, tuple[int, int]] = {}
    for number, version in enumerate(versions):
        first, end = np.searchsorted(column["file"], (number, number + 1)).tolist()
        if version[4] is not None and first < end:
            parts[version[4]] = (parts.get(version[4], (first,))[0], end)
    rows = StreamedRows(index, range(len(index.digests)))
    return TaskRows(rows, index.digests, column["bucket"], parts, *(int(column[n].sum()) for n in ("answered", "chat")))


def _name(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _not_made(root: Path, error: Exception) -> AgentRLError:
    cause: BaseException = error
    while not isinstance(cause, OSError) and cause.__cause__ is not None:
        cause = cause.__cause__
    if not isinstance(cause, OSError):
        return DataError(f"the index of the task data could not be made: {type(cause).__name__}: {cause}")
    return StorageError(
        f"the index of the task data cannot be written to {root}: {cause}. Free some space, or choose another folder "
        "(cache_dir, or the environment variable XDG_CACHE_HOME)."
    )


def spool(records: Iterable[tuple[str | None, object, Record]], columns: Columns, workers: int) -> TaskRows:
    """Rows of a function: written to a temporary folder that goes with this process, and indexed there.
    Raises DataError: a row is wrong or cannot be written as JSON; the text says which."""
    root = _own_folder()
    files: dict[str | None, Any] = {}
    with contextlib.ExitStack() as stack:
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
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(base, "agentrl", "tasks") if given is None else Path(given)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        if given is not None:
            raise _not_made(root, error) from error
        log.info("%s cannot be written (%s): the index of the task data goes into a temporary folder", root, error)
        return _own_folder()


def _own_folder() -> Path:
    # In a run, below its own folder for such: that goes with the run, should this process be killed.
    root = os.environ.get(SCRATCH_ENV) or None
    _temporary.append(tempfile.TemporaryDirectory(prefix="agentrl-tasks-", dir=root))
    return Path(_temporary[-1].name)
