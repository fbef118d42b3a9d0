"""Writing that survives a kill: whole files at once, lines appended with a repairable tail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from agentrl.errors import DataError, StorageError

_HINTS = {
    errno.ENOSPC: "the disk is full{where}: free some space there, then continue with --load",
    errno.EDQUOT: "the disk quota is used up{where}: free some space there, then continue with --load",
    errno.EACCES: "permission denied: choose another --output-dir",
    errno.EPERM: "permission denied: choose another --output-dir",
    errno.EROFS: "the file system is read-only: choose another --output-dir",
    errno.EISDIR: "a folder is in its place: move that away",
}
_PARTIAL = re.compile(r"\.(.+)\.\d+\.partial")


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk on which no more can be written."""


@contextlib.contextmanager
def storage_errors(path: Path | str) -> Iterator[None]:
    """Turn an OSError of writing ``path`` into a StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(f"{path}: cannot be written: {hint.replace('{where}', room_on(path))}") from error


def room_on(path: Path | str) -> str:
    """`` (<mount point>: 12 KB left of 3.2 GB)`` of a path's file system; empty where that is not to be had here."""
    place = Path(path).absolute().parent
    try:
        usage = shutil.disk_usage(place)
        while not place.is_mount():
            place = place.parent
    except OSError:
        return ""
    return f" ({place}: {_size(usage.free)} left of {_size(usage.total)})"


def _size(nbytes: float) -> str:
    for unit in ("KB", "MB"):
        nbytes /= 1000
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
    return f"{nbytes / 1000:.1f} GB"


def refuse_folders(*files: Path) -> None:
    """Raises StorageError where a folder is in the place of a file that is to be written."""
    for file in files:
        with storage_errors(file):
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder")


def lock_file(path: Path, refusal: str) -> IO[str]:
    """A file that no other process can hold until it is closed. Raises StorageError with ``refusal`` where one does."""
    with storage_errors(path.parent):
        lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StorageError(refusal) from None
    return lock


def flush(path: Path) -> None:
    """Have the disk keep the contents of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """:func:`flush` of a folder and of all that is below it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write ``path`` whole or not at all: a hidden file beside it, synced, then renamed over it.
    Raises StorageError: the disk is full or the folder not writable; ``path`` is as it was."""
    partial = _beside(path)
    with storage_errors(path):
        try:
            with partial.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        flush(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which then takes the place of ``path``, whole; what was there goes.
    Raises StorageError: the disk is full or the place not writable; ``path`` is as it was."""
    partial, old = _beside(path), _beside(path.with_name(path.name + ".old"))
    with storage_errors(path):
        remove_partials(path.parent, path.name, path.name + ".old")
        partial.mkdir(parents=True)
        try:
            yield partial
            flush_tree(partial)
            if path.exists():
                path.rename(old)
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        flush(path.parent)
        shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` atomically."""
    with atomic_file(path) as stream:
        stream.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON, atomically. NaN and infinities are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def remove_partials(folder: Path, *names: str) -> None:
    """Delete what killed writers left in ``folder``: of these files and folders, or of all."""
    for left in folder.glob(".*.partial"):
        match = _PARTIAL.fullmatch(left.name)
        if match is None or (names and match[1] not in names):
            continue
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """``value`` with NaN and infinities as None, which is what JSON can say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class JsonLines:
    """Append-only JSONL. A line is complete once :meth:`append` returned; a torn tail is cut on opening.

    Lines are ASCII (``\\u`` escapes), so no text of a model can break the file.
    """

    def __init__(self, path: Path):
        self.path = path
        with storage_errors(path):
            self._stream = path.open("ab+")
            self._cut_torn_tail()

    def _cut_torn_tail(self) -> None:
        """Drop what follows the last newline: a line whose writer was killed."""
        end = self._stream.seek(0, os.SEEK_END)
        position = end
        while position:
            step = min(4096, position)
            self._stream.seek(position - step)
            newline = self._stream.read(step).rfind(b"\n")
            if newline >= 0:
                position += newline + 1 - step
                break
            position -= step
        if position < end:
            self._stream.truncate(position)

    def append(self, *records: dict[str, Any]) -> None:
        """Write a line a record (:func:`to_json`), in one piece, and flush it."""
        lines = b"".join(f"{to_json(record)}\n".encode("ascii") for record in records)
        with storage_errors(self.path):
            self._stream.write(lines)
            self._stream.flush()

    def sync(self) -> None:
        """Make everything appended so far durable."""
        with storage_errors(self.path):
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file. May be called twice."""
        if not self._stream.closed:
            with storage_errors(self.path):
                self._stream.close()


def to_json(value: Any) -> str:
    """JSON text in ASCII. NaN and infinities become null, arrays lists, other objects their ``repr``."""

    def plain(other: Any) -> Any:
        return finite(other.tolist()) if hasattr(other, "tolist") else repr(other)

    return json.dumps(finite(value), allow_nan=False, default=plain)


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace ``path`` by a line a record, atomically."""
    with atomic_file(path) as stream:
        stream.writelines(f"{to_json(record)}\n".encode("ascii") for record in records)


def read_jsonl(path: Path, *, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; an unfinished last line is passed over, and where ``damaged`` is given each line
    that cannot be read is, too, and named there.
    Raises DataError: a line in the middle is not a JSON object; the text names file and line."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                problem = None if isinstance(record, dict) else f"expected an object, got {type(record).__name__}"
            except (ValueError, RecursionError) as error:
                problem = f"not a line of JSON: {error}"
            if problem is None:
                yield record
            elif damaged is None:
                raise DataError(f"{path}:{number}: {problem}")
            else:
                damaged.append(f"{path.name}:{number}: {problem}")
