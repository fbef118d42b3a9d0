"""Takes groups as they finish, decides what becomes of each, and says when there is a batch."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from agentrl.algorithms import Algorithm, TrainBatch
from agentrl.data.account import PendingGroup, TaskAccount
from agentrl.data.deaths import TASK_DEATHS, FailedTasks, engines_failed, failures, lived, never_fits
from agentrl.data.episodes import oldest_version
from agentrl.data.experience import REPLAY, Experience
from agentrl.data.filters import Filter
from agentrl.data.store import TrajectoryStore
from agentrl.errors import AgentRLError, EnvError
from agentrl.types import Group, StopReason

log = logging.getLogger(__name__)

FRUITLESS_ROLLOUTS = 3
"""Rollouts' tasks in a row of which none can be played that end a run: the environment is broken, whatever the task."""


FILTERED_ROUNDS = 10
"""Rounds after which a rollout is filled up with groups that its filter left out: a model that solves every task, or
none, would be asked for ever."""


@dataclass(frozen=True)
class Collected:
    """A rollout: its batch, the groups in it in the order they were handed out, and what was lost on the way."""

    batch: TrainBatch
    groups: list[Group]
    lost: list[Group]
    stale: list[Group]
    """Played, but by weights that are too old by now; their tasks are handed out again."""
    filtered: list[Group]
    """Played, and left out by the filter."""
    again: list[Group]
    """Of earlier rollouts, in the batch after the groups of this one."""
    notes: str | None
    """Sentences on the tasks that were given up, or that the filter left out in vain."""


@dataclass(eq=False)
class Sink:
    """Collects rollouts, several at a time if need be (:meth:`begin`), and makes a batch of one after the other
    (:meth:`take`, :meth:`mark_trained`)."""

    account: TaskAccount
    algorithm: Algorithm
    failed: FailedTasks
    store: TrajectoryStore
    size: int
    """Groups of a rollout."""
    at_once: int
    """Groups handed out at once, at least ``size``; more only with ``keep``."""
    keep: Filter | None = None
    """Which groups are trained on; None for all."""
    experience: Experience | None = None
    """Groups of earlier rollouts that are trained on again."""
    max_staleness: int | None = None
    """How many versions older than the trainer's the weights may be that sampled a token of a batch; None for any."""
    has_lived: bool = False
    trained: int = 0
    """Rollouts trained on."""
    _in_training: tuple[int, Collected] | None = None

    def begin(self, step: int) -> Rollout:
        """A rollout to be collected."""
        return Rollout(self, step, self.size - (self.experience.number_at(step) if self.experience else 0))

    async def take(self, rollout: Rollout) -> Collected | None:
        """What came together, for weights of version ``rollout.step``; its episodes are stored. None where there were
        no more tasks.
        Raises AgentRLError: no episode of the batch can be trained on; the text carries the last error."""
        stale: list[Group] = []
        groups: list[Group] = []
        limit = math.inf if self.max_staleness is None else self.max_staleness
        for group in rollout.living:
            (stale if rollout.step - oldest_version(group.trajectories) > limit else groups).append(group)
        self.account.give_back(group.group_id for group in stale)
        self.account.drop(group.group_id for group in rollout.filtered)
        if played := [*rollout.lost, *stale, *rollout.filtered, *groups]:
            await self._store(rollout.step, played)
        if stale and not groups:
            raise AgentRLError(
                f"all {len(stale)} groups of rollout {rollout.step} were sampled by weights that are more than "
                f"--max-staleness {limit} versions old, so there is nothing to train on: engines do not get new weights"
            )
        if not groups:
            return None
        again = self.experience.pick(rollout.step, limit) if self.experience else []
        chosen = self.algorithm.select([*groups, *again])
        new = chosen.intersection(t.trajectory_id for group in groups for t in group.trajectories)
        refuse_if_untrainable(groups, new, compares=self.algorithm.compares)
        batch = TrainBatch.from_groups([*groups, *again], chosen)
        notes = "; ".join(rollout.notes) or None
        collected = Collected(batch, groups, rollout.lost, stale, rollout.filtered, again, notes)
        self._in_training = rollout.step, collected
        return collected

    @property
    def untrained(self) -> list[Group]:
        """Groups of what was taken last, and is not trained on yet."""
        return self._in_training[1].groups if self._in_training is not None else []

    async def mark_trained(self, columns: Mapping[str, np.ndarray], *, tokens: bool) -> None:
        """The optimizer has taken what was taken last: its tasks count as trained, those that gave nothing as dropped.
        Its episodes are stored with what they were trained with, with ``tokens`` by token."""
        if self._in_training is None:
            return
        (step, done), self._in_training = self._in_training, None
        self.trained = step + 1
        groups, trained = [*done.lost, *done.stale, *done.filtered, *done.groups], set(done.batch.trajectory_ids)
        everything = [t for group in [*groups, *done.again] for t in group.trajectories]
        done.batch.note_trained(everything, columns, tokens=tokens)
        if done.again:
            await self._store(step, done.again, name=REPLAY)
        await self._store(step, groups)
        for group in done.groups:
            is_trained = any(t.trajectory_id in trained for t in group.trajectories)
            (self.account.mark_trained if is_trained else self.account.drop)([group.group_id])
        if self.experience is not None:
            taught = [g for g in done.groups if any(t.trajectory_id in trained for t in g.trajectories)]
            self.experience.add(step, taught, done.again)

    async def _store(self, step: int, groups: list[Group], *, name: str = "train") -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        await asyncio.to_thread(self.store.write, step, trajectories, name=name)

    async def refuse(self, step: int, groups: list[Group], fruitless: int) -> NoReturn:
        """End the run: none of these groups lived. The next start plays other tasks first."""
        groups = sorted(groups, key=never_fits, reverse=True)
        failed, total = failures(groups)
        await self._store(step, groups)
        self.failed.suspect(group for group in groups if not never_fits(group))
        raise EnvError(
            f"none of the {len(groups)} tasks of {fruitless} rollouts in a row could be played: {len(failed)} of "
            f"{total} episodes failed for reasons that are not the model's ({failed[-1].stop_reason}); the last error: "
            f"{failed[-1].error}. Nothing was trained on them. All of them are in {self.store.folder}."
        )


class Rollout:
    """A rollout as its groups finish: for each round of groups :meth:`expect`, :meth:`add` and :meth:`wanted`, until
    none is wanted or there are no more; then :meth:`settle`.

    A task dies when more than half of its episodes fail for reasons that are not the model's. Others take its place
    until half of the rollout lives; the dead are given back for a later rollout, and dropped at their third death.
    A task whose first prompt can never fit is dropped at once. The order in which groups finish decides nothing.

    With a filter a rollout is full, if need be after several rounds: groups that are left out teach nothing, and what
    is left over is given back. After :data:`FILTERED_ROUNDS` rounds it takes those that were left out.
    """

    def __init__(self, sink: Sink, step: int, size: int):
        self.sink, self.step, self.size = sink, step, size
        self.at_once = math.ceil(size * sink.at_once / sink.size)
        """Groups handed out at first."""
        self.seconds = 0.0
        """How long it was played."""
        self.carried: set[str] = set()
        """Ids of groups that were begun for an earlier rollout (``--partial-rollout``)."""
        self.lost: list[Group] = []
        self.filtered: list[Group] = []
        self.notes: list[str] = []
        self._rounds = 0
        self._try_again()

    def _try_again(self) -> None:
        self._order: dict[str, int] = {}
        self._round: list[Group] = []
        self.living: list[Group] = []
        self._dead: list[Group] = []
        self._fruitless = 0

    @property
    def played(self) -> list[Group]:
        """Groups that finished, and of which the account does not know yet what becomes: it has them in flight, or
        ready."""
        return [*self.living, *self.filtered, *self._round]

    def expect(self, groups: Iterable[PendingGroup | Group]) -> None:
        """These are handed out, in this order, which is theirs in the batch."""
        self._order = {each.group_id: place for place, each in enumerate(groups)}

    def add(self, group: Group) -> None:
        """One of them has finished."""
        self._round.append(group)

    async def wanted(self) -> int:
        """How many more groups the rollout needs, now that all handed out have finished.
        Raises EnvError: none of so many rollouts' tasks in a row lived. No death is counted then."""
        finished, self._round = sorted(self._round, key=lambda group: self._order[group.group_id]), []
        alive = [group for group in finished if lived(group)]
        self.sink.account.add_samples(alive)
        self._rounds += 1
        for group in alive:
            (self.living if self.sink.keep is None or self.sink.keep(group) else self.filtered).append(group)
        self._dead += [group for group in finished if not lived(group)]
        self._fruitless = 0 if alive else self._fruitless + 1
        by_engines = not alive and all(map(engines_failed, finished))  # then others would wait in vain, too
        if self._fruitless == FRUITLESS_ROLLOUTS or by_engines:
            await self.sink.refuse(self.step, self._dead, self._fruitless)
        missing = self.size - len(self.living)
        if self.sink.keep is None:
            return 0 if missing <= len(self.living) else missing
        if missing > 0 and self._rounds < FILTERED_ROUNDS:
            return math.ceil(missing * self.at_once / self.size)
        if missing > 0 and self.filtered:
            self._take_filtered(missing)
        self.sink.account.give_back(group.group_id for group in self.living[self.size :])
        del self.living[self.size :]
        return 0

    def _take_filtered(self, number: int) -> None:
        played = len(self.living) + len(self.filtered)
        self.notes.append(
            f"only {len(self.living)} of {played} groups passed --dynamic-sampling-filter-path in {self._rounds} "
            "rounds: the rollout was filled up with groups that did not"
        )
        self.living += self.filtered[:number]
        del self.filtered[:number]

    async def settle(self) -> bool:
        """Give dead tasks back, or drop them for good. Whether the rollout is done: if not, those given back are all
        that is left of the tasks, and are to be played again.
        Raises EnvError: nothing has lived since the start of the run, and there are no more tasks."""
        never = [group for group in self._dead if never_fits(group)]
        dead = [group for group in self._dead if not never_fits(group)]
        if alive := [*self.living, *self.filtered]:
            self.sink.has_lived = True
            self.sink.failed.forget(alive)
        elif dead and not self.sink.has_lived:
            await self.sink.refuse(self.step, self._dead, self._fruitless)
        gone = {group.task.task_id: group.trajectories[0].error for group in never}
        self.sink.account.drop(group.group_id for group in never)
        for group in dead:
            # Of its own, unless the engines failed it: that says nothing of the task.
            if not engines_failed(group) and self.sink.failed.died(group) >= TASK_DEATHS:
                gone[group.task.task_id] = failures([group])[0][-1].error
                self.sink.account.drop([group.group_id])
            else:
                self.sink.account.give_back([group.group_id])
        if dead:
            self.sink.failed.save()
        for task_id, error in gone.items():
            log.warning("task %s is dropped: %s", task_id, error)
        if gone:
            error = list(gone.values())[-1]
            self.notes.append(f"dropped, since they cannot be played: {', '.join(gone)}; the last error: {error}")
        self.lost += [*never, *dead]
        if dead and not alive:
            self._try_again()
            return False
        return True


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
