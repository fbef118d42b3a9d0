"""Takes groups as they finish, decides what becomes of each, and says when there is a batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from agentrl.algorithms import Algorithm, TrainBatch
from agentrl.data.account import PendingGroup, TaskAccount
from agentrl.data.deaths import TASK_DEATHS, FailedTasks, engines_failed, failures, lived, never_fits
from agentrl.data.store import TrajectoryStore
from agentrl.errors import AgentRLError, EnvError
from agentrl.types import Group, StopReason

log = logging.getLogger(__name__)

FRUITLESS_ROLLOUTS = 3
"""Rollouts' tasks in a row of which none can be played that end a run: the environment is broken, whatever the task."""


@dataclass(frozen=True)
class Collected:
    """A rollout: its batch, the groups in it in the order they were handed out, and what was lost on the way."""

    batch: TrainBatch
    groups: list[Group]
    lost: list[Group]
    dropped: str | None
    """A sentence on the tasks that were given up."""


class Sink:
    """Collects one rollout after the other: :meth:`begin`, then for each round of groups :meth:`expect`,
    :meth:`add` and :meth:`wanted`, until none is wanted or there are no more; :meth:`settle`, :meth:`take`.

    A task dies when more than half of its episodes fail for reasons that are not the model's. Others take its place
    until half of the rollout lives; the dead are given back for the next rollout, and dropped at their third death.
    A task whose first prompt can never fit is dropped at once. The order in which groups finish decides nothing.

    Args:
        account: the account of tasks.
        algorithm: says which episodes can be trained on.
        failed: tasks that died before.
        store: where episodes go.
        size: groups of a rollout.
    """

    def __init__(
        self, account: TaskAccount, algorithm: Algorithm, *, failed: FailedTasks, store: TrajectoryStore, size: int
    ):
        self.account, self.algorithm, self.failed, self.store, self.size = account, algorithm, failed, store, size
        self._has_lived = False
        self._in_training: tuple[int, Collected] | None = None
        self.begin(0)

    def begin(self, step: int) -> None:
        """What comes from now on is of this rollout."""
        self.step = step
        self._dropped: list[str] = []
        self._lost: list[Group] = []
        self._try_again()

    def _try_again(self) -> None:
        self._order: dict[str, int] = {}
        self._round: list[Group] = []
        self._living: list[Group] = []
        self._dead: list[Group] = []
        self._fruitless = 0

    def expect(self, groups: Iterable[PendingGroup]) -> None:
        """These are handed out, in this order, which is theirs in the batch."""
        self._order = {each.group_id: place for place, each in enumerate(groups)}

    def add(self, group: Group) -> None:
        """One of them has finished."""
        self._round.append(group)

    async def wanted(self) -> int:
        """How many more groups the rollout needs, now that all handed out have finished.

        Raises:
            EnvError: none of so many rollouts' tasks in a row lived. No death is counted then.
        """
        finished, self._round = sorted(self._round, key=lambda group: self._order[group.group_id]), []
        alive = [group for group in finished if lived(group)]
        self.account.add_samples(alive)
        self._living += alive
        self._dead += [group for group in finished if not lived(group)]
        self._fruitless = 0 if alive else self._fruitless + 1
        by_engines = not alive and all(map(engines_failed, finished))  # then others would wait in vain, too
        if self._fruitless == FRUITLESS_ROLLOUTS or by_engines:
            await self._refuse()
        return 0 if 2 * len(self._living) >= self.size else self.size - len(self._living)

    async def settle(self) -> bool:
        """Give dead tasks back, or drop them for good. Whether the rollout is done: if not, those given back are all
        that is left of the tasks, and are to be played again.

        Raises:
            EnvError: nothing has lived since the start of the run, and there are no more tasks.
        """
        never = [group for group in self._dead if never_fits(group)]
        dead = [group for group in self._dead if not never_fits(group)]
        if self._living:
            self._has_lived = True
            self.failed.forget(self._living)
        elif dead and not self._has_lived:
            await self._refuse()
        gone = {group.task.task_id: group.trajectories[0].error for group in never}
        self.account.drop(group.group_id for group in never)
        for group in dead:
            # Of its own, unless the engines failed it: that says nothing of the task.
            if not engines_failed(group) and self.failed.died(group) >= TASK_DEATHS:
                gone[group.task.task_id] = failures([group])[0][-1].error
                self.account.drop([group.group_id])
            else:
                self.account.give_back([group.group_id])
        if dead:
            self.failed.save()
        for task_id, error in gone.items():
            log.warning("task %s is dropped: %s", task_id, error)
        if gone:
            error = list(gone.values())[-1]
            self._dropped.append(f"dropped, since they cannot be played: {', '.join(gone)}; the last error: {error}")
        self._lost += [*never, *dead]
        if dead and not self._living:
            self._try_again()
            return False
        return True

    async def take(self) -> Collected | None:
        """What came together since :meth:`begin`; its episodes are stored. None where there were no more tasks.

        Raises:
            AgentRLError: no episode of the batch can be trained on; the text carries the last error.
        """
        groups = self._living
        if groups or self._lost:
            await self._store(self.step, [*self._lost, *groups])
        if not groups:
            return None
        chosen = self.algorithm.select(groups)
        refuse_if_untrainable(groups, chosen, compares=self.algorithm.compares)
        batch = TrainBatch.from_groups(groups, chosen)
        collected = Collected(batch, groups, self._lost, " ".join(self._dropped) or None)
        self._in_training = self.step, collected
        return collected

    async def mark_trained(self, columns: Mapping[str, np.ndarray], *, tokens: bool) -> None:
        """The optimizer has taken what was taken last: its tasks count as trained, those that gave nothing as dropped.
        Its episodes are stored with what they were trained with, with ``tokens`` by token."""
        if self._in_training is None:
            return
        (step, done), self._in_training = self._in_training, None
        groups, trained = [*done.lost, *done.groups], set(done.batch.trajectory_ids)
        done.batch.note_trained([t for group in groups for t in group.trajectories], columns, tokens=tokens)
        await self._store(step, groups)
        for group in done.groups:
            is_trained = any(t.trajectory_id in trained for t in group.trajectories)
            (self.account.mark_trained if is_trained else self.account.drop)([group.group_id])

    async def _store(self, step: int, groups: list[Group]) -> None:
        await asyncio.to_thread(self.store.write, step, [t for group in groups for t in group.trajectories])

    async def _refuse(self) -> NoReturn:
        """End the run: nothing lived. The next start plays other tasks first."""
        groups = sorted(self._dead, key=never_fits, reverse=True)
        failed, total = failures(groups)
        await self._store(self.step, groups)
        self.failed.suspect(group for group in groups if not never_fits(group))
        raise EnvError(
            f"none of the {len(groups)} tasks of {self._fruitless} rollouts in a row could be played: {len(failed)} of "
            f"{total} episodes failed for reasons that are not the model's ({failed[-1].stop_reason}); the last error: "
            f"{failed[-1].error}. Nothing was trained on them. All of them are in {self.store.folder}."
        )


def refuse_if_untrainable(groups: list[Group], chosen: set[str], *, compares: bool) -> None:
    """Raises AgentRLError where no episode is chosen to be trained on, by an algorithm that ``compares`` or not."""
    failed, total = failures(groups)
    for episode in failed[:3]:
        log.warning("episode %s: %s: %s", episode.episode_id, episode.stop_reason, episode.error)
    waited = [t for group in groups for t in group.trajectories if t.stop_reason is StopReason.ENGINE_TIMEOUT]
    late = f", {len(waited)} ran out of time ({waited[-1].error})" if waited else ""
    if waited:
        log.warning("not trained on: of %d episodes%s", total, late)
    if chosen:
        return
    lost = f"{len(failed)} of {total} failed{late}"
    if not compares:
        raise AgentRLError(f"no episode of this rollout can be trained on: {lost}")
    raise AgentRLError(
        f"no group of this rollout has two episodes that can be compared, so there is nothing to train on: "
        f"{total // len(groups)} episodes a task were asked for (--n-samples-per-prompt, at least 2), {lost}"
    )
