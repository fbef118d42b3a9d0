"""Writing that survives a kill: whole files at once, lines appended with a repairable tail."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from agentrl.errors import DataError, StorageError

_HINTS = {
    errno.ENOSPC: "the disk is full: free some space, then continue with --load",
    errno.EDQUOT: "the disk quota is used up: free some space, then continue with --load",
    errno.EACCES: "permission denied: choose another --output-dir",
    errno.EPERM: "permission denied: choose another --output-dir",
    errno.EROFS: "the file system is read-only: choose another --output-dir",
}


@contextlib.contextmanager
def storage_errors(path: Path | str) -> Iterator[None]:
    """Turn an OSError of writing ``path`` into a StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(f"{path}: cannot be written: {hint}") from error


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write ``path`` whole or not at all: a hidden file beside it, synced, then renamed over it.

    Raises:
        StorageError: The disk is full or the folder not writable; ``path`` is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with storage_errors(path):
        try:
            with partial.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` atomically."""
    with atomic_file(path) as stream:
        stream.write(text.encode("utf-8"))


def remove_partials(folder: Path) -> None:
    """Delete what killed writers left in ``folder``."""
    for leftover in folder.glob(".*.partial"):
        leftover.unlink(missing_ok=True)


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
        """Write a line a record, in one piece, and flush it. NaN and infinities become null."""
        lines = [json.dumps(finite(record), allow_nan=False, default=_plain) + "\n" for record in records]
        with storage_errors(self.path):
            self._stream.write("".join(lines).encode("ascii"))
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


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as Python numbers and lists."""
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; an unfinished last line is passed over.

    Raises:
        DataError: A line in the middle is not JSON; the text names file and line.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a line of JSON: {error}") from None
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: expected an object, got {type(record).__name__}")
            yield record
