"""Python's garbage collector while episodes are played: seldom.

Trajectories are made of many small objects that live on (messages, records of turns), and each time their number has
grown by a quarter the collector walks over all of them, finding nothing. With hundreds of episodes in flight
that is a third of a turn's CPU time (``benchmarks/concurrency.py``).
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType

THRESHOLD = 50_000
"""New objects before the collector looks at the young ones; Python's own is 700."""


class SeldomCollected:
    """A context in which the collector runs seldom. Contexts may overlap; the last to end restores what was set."""

    def __init__(self) -> None:
        self._open = 0
        self._before = gc.get_threshold()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._before = gc.get_threshold()
                young, *older = self._before
                if 0 < young < THRESHOLD:  # 0: someone switched the collector off
                    gc.set_threshold(THRESHOLD, *older)
            self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                gc.set_threshold(*self._before)


SELDOM = SeldomCollected()
"""That of this process."""
