"""``Jail``: files below one folder, opened so that no path and no link leads out of it.

Every component of a path is opened by itself, relative to the folder before it and without following links
(``openat`` with ``O_NOFOLLOW``). So nothing is checked by name first and opened by name later, and a link that is
put in place in between is refused like any other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from agentrl.tools.arguments import shorten

MAX_PATH = 1024
"""Bytes of a path."""
MAX_DEPTH = 16
"""Folders inside one another."""
MAX_NAMES = 10_000
"""Names read of one folder."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe would wait for its other end.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class JailError(Exception):
    """A path is not allowed, or what it names cannot be used so. The text is short and names no folder outside."""


class Entry(NamedTuple):
    """A file below the jail's folder. ``path`` is relative to it; ``size`` in bytes."""

    path: str
    size: int


def split(path: str) -> tuple[str, ...]:
    """The components of a path relative to the folder; none for the folder itself.
    Raises JailError: it is absolute, leads upwards, is too long, or cannot be a path."""
    if "\0" in path:
        raise JailError("a path has no null characters")
    try:
        length = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        raise JailError("a path is Unicode text without lone surrogates") from None
    if length > MAX_PATH:
        raise JailError(f"a path has at most {MAX_PATH} bytes, this one has {length}")
    if path.startswith("/"):
        raise JailError(f"{shorten(path, 80)!r} is absolute; write paths relative to the folder, such as notes.txt")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise JailError(f"{shorten(path, 80)!r} leads out of the folder; '..' is not allowed")
    if len(parts) > MAX_DEPTH:
        raise JailError(f"folders nest at most {MAX_DEPTH} deep")
    return parts


class Jail:
    """Files below one existing folder, which with ``remove`` :meth:`close` removes with all that is in it.
    Raises OSError: the folder cannot be opened."""

    def __init__(self, folder: str, *, remove: bool = False) -> None:
        self.folder = folder
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Also when an episode is dropped without being closed, and when the process ends.
        self._finalizer = weakref.finalize(self, _release, self._root, folder if remove else None, os.getpid())

    def close(self) -> None:
        """Lets the folder go. May be called twice."""
        self._finalizer()

    def read(self, path: str, limit: int) -> tuple[bytes, int]:
        """The first ``limit`` bytes of a file, and its size.
        Raises JailError: there is no such file, or it is not an ordinary one."""
        parts = _named(path)
        with _explained(path), self._folder(parts[:-1]) as folder:
            descriptor = os.open(parts[-1], _READ, dir_fd=folder)
            with open(descriptor, "rb") as file:
                state = os.fstat(descriptor)
                if not stat.S_ISREG(state.st_mode):
                    raise JailError(f"{shorten(path, 80)!r} is {_kind(state.st_mode)}, not a file")
                return file.read(limit), state.st_size

    def write(self, path: str, data: bytes) -> int:
        """Writes a file, and the folders it is in, of which it returns how many were made; a reader sees the old
        content or the new, never half of it.
        Raises JailError: the name is taken by something that is not an ordinary file."""
        parts = _named(path)
        made: list[tuple[str, int]] = []
        with _explained(path), contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._folder(()))
            try:
                for part in parts[:-1]:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                        made.append((part, folder))
                    folder = os.open(part, _FOLDER, dir_fd=folder)
                    stack.callback(os.close, folder)
                state = self._state(parts[-1], folder)
                if state is not None and not stat.S_ISREG(state.st_mode):
                    raise JailError(f"{shorten(path, 80)!r} is {_kind(state.st_mode)}, not a file")
                _put(parts[-1], data, folder)
            except BaseException:
                for part, inside in reversed(made):  # what failed leaves nothing that nobody counts
                    with contextlib.suppress(OSError):
                        os.rmdir(part, dir_fd=inside)
                raise
        return len(made)

    def files(self, path: str = ".", limit: int = 1000) -> Iterator[Entry]:
        """The ordinary files below a folder, in the order of their names, at most ``limit``.

        Links and special files are left out. For the path of a file, that file.

        Raises JailError: there is no such folder."""
        parts = split(path)
        with _explained(path):
            if parts:
                with self._folder(parts[:-1]) as folder:
                    state = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(state.st_mode):
                    yield Entry("/".join(parts), state.st_size)
                    return
            yield from islice(self._walk(parts), limit)

    def _walk(self, parts: tuple[str, ...]) -> Iterator[Entry]:
        with self._folder(parts) as folder, os.scandir(folder) as found:
            names = sorted(islice((entry.name for entry in found), MAX_NAMES))
            for name in names:
                state, here = self._state(name, folder), (*parts, name)
                if state is not None and stat.S_ISREG(state.st_mode):
                    yield Entry("/".join(here), state.st_size)
                elif state is not None and stat.S_ISDIR(state.st_mode) and len(here) <= MAX_DEPTH:
                    with contextlib.suppress(OSError):  # replaced or removed meanwhile
                        yield from self._walk(here)

    @staticmethod
    def _state(name: str, folder: int) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _folder(self, parts: Sequence[str]) -> Iterator[int]:
        """A descriptor of the folder with these components, each opened by itself."""
        if not self._finalizer.alive:
            raise JailError("the episode is over and its folder is gone")
        descriptor = os.dup(self._root)
        try:
            for part in parts:
                inner = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)


def _put(name: str, data: bytes, folder: int) -> None:
    """Writes a file beside and renames it, which replaces a link put there meanwhile instead of following it."""
    partial = f".{secrets.token_hex(8)}.partial"
    try:
        with open(os.open(partial, _CREATE, 0o644, dir_fd=folder), "wb") as file:
            file.write(data)
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=folder)
        raise


def _named(path: str) -> tuple[str, ...]:
    parts = split(path)
    if not parts:
        raise JailError("the path of a file is needed, such as notes.txt")
    return parts


_TEXTS = {
    errno.ENOENT: "does not exist",
    errno.ELOOP: "is a link, and links are not followed",
    errno.ENOTDIR: "goes through something that is not a folder",
    errno.EISDIR: "is a folder, not a file",
    errno.EACCES: "may not be used so",
    errno.EPERM: "may not be used so",
    errno.ENXIO: "is a special file, not a file",
    errno.ENAMETOOLONG: "has a name that is too long",
    errno.ENOSPC: "cannot be written: the disk is full",
    errno.EROFS: "cannot be written: it is on a read-only disk",
}


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = _TEXTS.get(error.errno or 0, f"cannot be used ({os.strerror(error.errno or 0)})")
        raise JailError(f"{shorten(path, 80)!r} {text}") from error


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def _release(root: int, folder: str | None, owner: int) -> None:
    os.close(root)
    if folder is not None and os.getpid() == owner:  # not in a process forked from the one that made it
        shutil.rmtree(folder, ignore_errors=True)
