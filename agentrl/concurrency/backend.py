"""Servers that tools ask, and whether they are there: while one is away, no episode begins that would only fail on it.

A circuit breaker: whoever finds a server away says so (:meth:`Backend.down`), a thread asks it again and again, and the
first answer, to that thread or to anybody else, lets episodes begin again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from agentrl.errors import InfraError, LostError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Between two probes, which doubles."""
LOOK_S = 0.2


class Backend:
    """A server that tools of this process share. Safe to use from threads.

    Args:
        name: what a person calls it, such as ``the retrieval server http://...``.
        probe: asks it something cheap; raises while it is away. It needs a deadline of its own.
        patience: seconds for which it is waited for. Then the run ends.

    Example:
        >>> weather = Backend("the weather service", probe=lambda: None)
        >>> error = weather.down("connection refused")
        >>> weather.up()
        >>> str(error)
        'the weather service is away: connection refused'
    """

    away: ClassVar[list[Backend]] = []
    """Those of this process that do not answer."""

    def __init__(self, name: str, probe: Callable[[], object], *, patience: float = 300.0):
        self.name, self.patience = name, patience
        self._probe, self._lock = probe, threading.Lock()
        self._since, self._problem = 0.0, ""
        self._answered = threading.Event()

    def down(self, problem: object) -> InfraError:
        """It did not answer. Returns the error to raise: the episode is nobody's fault, and is played again."""
        with self._lock:
            self._problem = str(problem)
            if self not in Backend.away:
                self._since, self._answered = time.monotonic(), threading.Event()
                Backend.away.append(self)
                log.warning("%s; no episode begins until it answers, for %g s at most", self._said(), self.patience)
                threading.Thread(target=self._ask, args=(self._answered,), daemon=True, name="probe").start()
        return InfraError(self._said())

    def up(self) -> None:
        """It answered."""
        if self not in Backend.away:  # the rule, for which nobody waits
            return
        with self._lock:
            if self in Backend.away:
                log.warning("%s is back after %.0f s", self.name, self.seconds)
                Backend.away.remove(self)
                self._answered.set()

    @property
    def seconds(self) -> float:
        """For which it has been away."""
        return time.monotonic() - self._since

    def _said(self) -> str:
        return f"{self.name} is away: {self._problem}"

    def _ask(self, answered: threading.Event) -> None:
        pause = FIRST_PAUSE_S
        while not answered.wait(pause):
            try:
                self._probe()
            except Exception as error:  # a client's, of any kind
                self._problem = str(error) or type(error).__name__
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self.up()

    @classmethod
    def what_is_away(cls) -> str:
        """For a person; empty where all is well."""
        return "; ".join(f"{backend.name} is away for {backend.seconds:.0f} s" for backend in list(cls.away))

    @classmethod
    async def all_there(cls) -> None:
        """Waits until none is away. Raises LostError: one has been away for longer than its patience."""
        while away := list(cls.away):
            for backend in away:
                if backend.seconds >= backend.patience:
                    raise LostError(
                        f"{backend.name} has been away for {backend.seconds:.0f} s ({backend._problem}), longer than "
                        f"the {backend.patience:g} s for which it is waited for: nothing can be played. Start it again"
                    )
            await asyncio.sleep(LOOK_S)
