"""Plays rollouts ahead of the one that is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from agentrl.orchestrator.dispatcher import end

T = TypeVar("T")


class Ahead(Generic[T]):
    """Rollouts in play, or played and not taken yet: the next one, and at most so many after it.

    A rollout always has the tasks that it would have without the others, so that what is trained on, and in which
    order, does not depend on how long episodes take: none is left out for being slow. What that costs is that a rollout
    waits for its slowest episode; those ahead of it are played meanwhile.

    Args:
        play: plays the rollout of a number.
        ahead: how many after the next one; 0 takes turns with the trainer.
        end: number of rollouts of the run.
    """

    def __init__(self, play: Callable[[int], Coroutine[Any, Any, T]], *, ahead: int, end: int):
        self._play, self._ahead, self._end = play, ahead, end
        self._playing: dict[int, asyncio.Task[T]] = {}

    async def take(self, step: int) -> T:
        """The rollout ``step``; from now on those after it may be played. An error of its own is raised here."""
        for number in range(step, min(step + self._ahead + 1, max(self._end, step + 1))):
            if number not in self._playing:
                self._playing[number] = asyncio.create_task(self._play(number))
        try:
            return await self._playing[step]
        finally:
            self._playing.pop(step).cancel()

    @property
    def ready(self) -> int:
        """Rollouts that were played and not taken yet."""
        return sum(task.done() for task in self._playing.values())

    async def close(self, seconds: float) -> None:
        """End what is in play, in so many seconds at most. Its tasks are still in flight for the account."""
        playing, self._playing = self._playing.values(), {}
        await end(playing, seconds)
