"""Writing that may wait: done at once, or gathered and done by another thread, beside what goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from agentrl.data.files import storage_errors


class Writes:
    """Calls that write a file or a folder each, put off until :meth:`finish` where they may come ``later``: what they
    write must then be copies of their own."""

    def __init__(self, *, later: bool = False):
        self.later = later
        self._calls: deque[tuple[Callable[[Path], object], Path]] = deque()

    def __call__(self, write: Callable[[Path], object], path: Path) -> None:
        """``write(path)``, now or later. Raises StorageError when the disk refuses."""
        self._calls.append((write, path))
        if not self.later:
            self.finish()

    def finish(self) -> None:
        """Do what was put off, in its order. After an error the rest is dropped.
        Raises StorageError: the disk refuses."""
        calls, self._calls = self._calls, deque()
        while calls:
            write, path = calls.popleft()
            with storage_errors(path):
                write(path)
            del write  # with the memory of what it wrote, before the next one
