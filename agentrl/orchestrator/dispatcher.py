"""Hands tasks out, keeps groups that outlive the rollout that they were handed out for, and plays rollouts ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from agentrl.data.account import PendingGroup, TaskAccount
from agentrl.data.deaths import FailedTasks
from agentrl.types import Group

T = TypeVar("T")


class Dispatcher:
    """Knows neither what becomes of groups nor how many a batch has."""

    def __init__(self, account: TaskAccount, *, failed: FailedTasks):
        self._account, self._failed = account, failed
        self._put_off: list[PendingGroup] = []

    def draw(self, number: int, *, suspects: int = 0) -> list[PendingGroup]:
        """The next groups to play; fewer than ``number`` only when there are no more tasks. At most ``suspects`` are of
        tasks that failed before, since others show whether it is their doing; more only where there are no others at
        all."""
        drawn: list[PendingGroup] = []
        while (
            number > (there := len(drawn) + min(suspects, len(self._put_off)))
            and (new := self._account.get_samples(number - there))
        ):  # fmt: skip
            for pending in new:
                known = pending.task.task_id in self._failed and len(self._put_off) < len(self._failed)
                (self._put_off if known else drawn).append(pending)
        if len(drawn) < number:
            room = number - len(drawn)
            suspects = min(suspects, room) if drawn else room
            drawn += self._put_off[:suspects]
            del self._put_off[:suspects]
        return drawn


class Carried:
    """Groups that may outlive the rollout that they were handed out for (``--partial-rollout``): in play, or finished
    and not taken yet. Their episodes go on, in their environments, until somebody takes them."""

    def __init__(self, play: Callable[[PendingGroup], Coroutine[Any, Any, Group]]):
        self._play = play
        self._begun: dict[asyncio.Task[Group], int] = {}

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def finished(self) -> list[Group]:
        """Groups that have finished and were not taken yet."""
        done = [task for task in self._begun if task.done() and not task.cancelled()]
        return [task.result() for task in done if task.exception() is None]

    def begin(self, groups: Iterable[PendingGroup], step: int) -> None:
        """Play these, handed out for the rollout ``step``."""
        self._begun.update((asyncio.create_task(self._play(pending)), step) for pending in groups)

    async def take(self, number: int, *, due: float) -> list[tuple[Group, int]]:
        """Groups that have finished, in the order they were handed out, and the rollout each was begun for: ``number``
        of them, as soon as there are so many and none is in play that was begun for rollout ``due`` or before. Fewer
        when there are no more."""
        while True:
            playing = [task for task in self._begun if not task.done()]
            enough = len(self) - len(playing) >= number
            if not playing or (enough and all(self._begun[task] > due for task in playing)):
                break
            await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
        finished = [task for task in self._begun if task.done()][:number]
        return [(task.result(), self._begun.pop(task)) for task in finished]

    async def close(self, seconds: float) -> None:
        """End what is in play, in so many seconds at most. Its tasks are still in flight for the account."""
        playing, self._begun = list(self._begun), {}
        await end(playing, seconds)


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


async def end(playing: Collection[asyncio.Task[Any]], seconds: float) -> None:
    """Cancel these, and wait for that so many seconds at most."""
    for task in playing:
        task.cancel()
    if playing:
        await asyncio.wait(playing, timeout=seconds)
