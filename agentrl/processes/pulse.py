"""The pulse of a process: that it lives, and for how long the work at hand has come no further.

A thread of its own answers (see :mod:`agentrl.orchestrator.watch`), so a process gives a pulse whatever it works on,
also in a collective that never ends. So who works marks each part that is done, and the pulse says when that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

log = logging.getLogger(__name__)

MARK_S = 1.0


class Pulse(NamedTuple):
    """What a process says of itself."""

    pid: int
    stalled: float
    """Seconds since the work at hand came further; 0 where there is none."""
    at: str = ""
    """What it works on."""


class Work:
    """What a process works on: one thing at a time."""

    def __init__(self) -> None:
        self._at, self._marked, self._told = "", 0.0, False

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Within, the process works on this."""
        self.mark()
        self._at = what
        try:
            yield
        finally:
            self._at = ""

    def mark(self) -> None:
        """A part of it is done."""
        self._marked, self._told = time.monotonic(), False

    def pulse(self, patience: float) -> Pulse:
        """From any thread. Where nothing was marked for ``patience`` seconds, the log gets all threads' stacks."""
        at, marked = self._at, self._marked
        pulse = Pulse(os.getpid(), time.monotonic() - marked if at else 0.0, at)
        if pulse.stalled > patience and not self._told:
            self._told = True
            log.error("%s came no further for %.0f s; the threads of this process:\n%s", at, pulse.stalled, stacks())
        return pulse

    async def marked_by_this_loop(self, what: str) -> None:
        """Mark for as long as this event loop turns."""
        with self.on(what):
            while True:
                self.mark()
                await asyncio.sleep(MARK_S)


WORK = Work()
"""Of this process."""


def stacks() -> str:
    """The stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
