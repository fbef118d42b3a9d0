"""Time limits of waits that follow one another, at the cost of one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class OutOfTime(TimeoutError):
    """A wait took longer than it may; no other code raises it."""


@dataclass(slots=True, eq=False)
class _Wait:
    task: asyncio.Task[object]
    due: float
    expired: bool = False


class Clock:
    """Ends waits that take too long, as ``asyncio.timeout`` does.

    A timer costs more than most waits of an episode take, and nearly none of them ever rings: here it is set for the
    first wait, and when it rings it is set again for the one that is then the next to end.
    """

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timer

    async def within(self, seconds: float, awaited: Awaitable[T]) -> T:
        """What ``awaited`` gives. Raises OutOfTime: it took longer than ``seconds``, and was cancelled."""
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        loop = task.get_loop()
        wait = _Wait(task, loop.time() + seconds)
        self._waits.add(wait)
        if self._timer is None or self._loop is not loop or wait.due < self._timer.when():
            self._set(loop)
        before = task.cancelling()
        try:
            return await awaited
        except asyncio.CancelledError:
            if wait.expired and task.cancelling() == before + 1:  # nobody else cancelled it too
                raise OutOfTime from None
            raise
        finally:
            self._waits.remove(wait)
            if wait.expired:
                task.uncancel()

    def close(self) -> None:
        """No wait follows: the timer goes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        if due := [wait.due for wait in self._waits if not wait.expired]:
            self._timer, self._loop = loop.call_at(min(due), self._ring, loop), loop

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for wait in self._waits:
            if not wait.expired and wait.due <= now + 1e-3:
                wait.expired = True
                wait.task.cancel()
        self._set(loop)
