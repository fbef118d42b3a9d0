"""Hands tasks out and has their groups played, until a rollout has what it needs of groups that lived."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from agentrl.data.account import DataBuffer, Draw
from agentrl.data.deaths import TASK_DEATHS, FailedTasks, engines_failed, failures, lived, never_fits
from agentrl.data.store import TrajectoryStore
from agentrl.errors import EnvError
from agentrl.orchestrator.tally import Tally
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import Group

log = logging.getLogger(__name__)

FRUITLESS_ROLLOUTS = 3
"""Rollouts' tasks in a row of which none can be played that end a run: the environment is broken, whatever the task."""


class Dispatcher:
    """Plays the groups of one rollout after the other.

    Args:
        buffer: the account of tasks.
        runner: plays episodes.
        failed: tasks that died before.
        store: where episodes go when nothing lived.
        tally: counts what is played.
        size: groups of a rollout.
        samples: episodes of a group.
        unless_broken: awaits episodes, and raises when they can come to no end.
    """

    def __init__(
        self,
        buffer: DataBuffer,
        runner: EpisodeRunner,
        *,
        failed: FailedTasks,
        store: TrajectoryStore,
        tally: Tally,
        size: int,
        samples: int,
        unless_broken: Callable[[asyncio.Future[Any]], Awaitable[Any]],
    ):
        self.buffer, self.runner = buffer, runner
        self.failed, self.store, self.tally = failed, store, tally
        self.size, self.samples = size, samples
        self._unless_broken = unless_broken
        self._put_off: list[Draw] = []
        self._has_lived = False

    async def play(self, step: int) -> tuple[list[Group], list[Group], str | None]:
        """A rollout's groups to train on, those that gave nothing, and a sentence on tasks that are dropped.

        A task dies when more than half of its episodes fail for reasons that are not the model's. Others take its place
        until half of the rollout lives; the dead are played again in the next rollout, and dropped at their
        third death. A task whose first prompt can never fit is dropped at once.

        Raises:
            EnvError: none of so many rollouts' tasks in a row lived. No death is counted then.
        """
        size = self.size
        living: list[Group] = []
        dead: list[Group] = []
        never: list[Group] = []
        fruitless, draws = 0, self._draw(size, suspects=max(1, size // 2))
        while draws:
            self.tally.begin(len(draws) * self.samples)
            playing = (
                self.runner.run_group(d.task, self.samples, d.group_id, on_trajectory=self.tally.add) for d in draws
            )
            groups = await self._unless_broken(asyncio.gather(*playing))
            alive = [group for group in groups if lived(group)]
            self.buffer.add_samples(alive)
            living += alive
            never += [group for group in groups if never_fits(group)]
            dead += [group for group in groups if not lived(group) and not never_fits(group)]
            fruitless = 0 if alive else fruitless + 1
            by_engines = not alive and all(map(engines_failed, groups))  # then others would wait in vain, too
            if fruitless == FRUITLESS_ROLLOUTS or by_engines:
                await self._refuse_dead(step, [*never, *dead], fruitless)
            if 2 * len(living) >= size:
                break
            draws = self._draw(size - len(living))
        if living:
            self._has_lived = True
            self.failed.forget(living)
        elif dead and not self._has_lived:  # all the tasks there are
            await self._refuse_dead(step, [*never, *dead], fruitless)
        dropped = self._bury(never, dead)
        if dead and not living:  # the data source has ended: the dead are all that is left
            played, lost, more = await self.play(step)
            return played, [*never, *dead, *lost], " ".join(filter(None, (dropped, more))) or None
        return self.buffer.take(len(living)), [*never, *dead], dropped

    def _draw(self, number: int, *, suspects: int = 0) -> list[Draw]:
        """The next draws, of which so many may be tasks that failed before: others show whether it is their doing."""
        draws: list[Draw] = []
        while (
            number > (there := len(draws) + min(suspects, len(self._put_off)))
            and (new := self.buffer.get_samples(number - there))
        ):  # fmt: skip
            for draw in new:
                known = draw.task.task_id in self.failed and len(self._put_off) < len(self.failed)
                (self._put_off if known else draws).append(draw)
        if len(draws) < number:
            suspects = number - len(draws) if not draws else min(suspects, number - len(draws))
            draws += self._put_off[:suspects]
            del self._put_off[:suspects]
        return draws

    def _bury(self, never: list[Group], dead: list[Group]) -> str | None:
        """Give dead tasks back, or drop them for good; a sentence that names the latter."""
        gone = {group.task.task_id: group.trajectories[0].error for group in never}
        self.buffer.drop([group.group_id for group in never])
        for group in dead:
            # Of its own, unless the engines failed it: that says nothing of the task.
            if not engines_failed(group) and self.failed.died(group) >= TASK_DEATHS:
                gone[group.task.task_id] = failures([group])[0][-1].error
                self.buffer.drop([group.group_id])
            else:
                self.buffer.give_back([group.group_id])
        if dead:
            self.failed.save()
        for task_id, error in gone.items():
            log.warning("task %s is dropped: %s", task_id, error)
        if not gone:
            return None
        error = list(gone.values())[-1]
        return f"dropped, since they cannot be played: {', '.join(gone)}; the last error: {error}"

    async def _refuse_dead(self, step: int, groups: list[Group], rollouts: int) -> NoReturn:
        """End the run: nothing lived. The next start plays other tasks first."""
        failed, total = failures(groups)
        await asyncio.to_thread(self.store.write, step, [t for group in groups for t in group.trajectories])
        self.failed.suspect(group for group in groups if not never_fits(group))
        raise EnvError(
            f"none of the {len(groups)} tasks of {rollouts} rollouts in a row could be played: {len(failed)} of "
            f"{total} episodes failed for reasons that are not the model's ({failed[-1].stop_reason}); the last error: "
            f"{failed[-1].error}. Nothing was trained on them. All of them are in {self.store.folder}."
        )
