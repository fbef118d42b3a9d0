"""Groups that were trained on, to be trained on again (``--replay-share``), and which of them
(``--buffer-filter-path``)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentrl.data.episodes import by_episode, by_group, forget_training, is_error, oldest_version, reward_of, solved
from agentrl.data.rules import choosing, own_function
from agentrl.data.store import TrajectoryStore
from agentrl.types import Group

if TYPE_CHECKING:
    from agentrl.config.schema import Config

BufferFilter = Callable[["Config", list[Group], int], Sequence[Group]]
"""``buffer_filter(args, buffer, num_samples)``: of the groups in ``buffer``, oldest first, at most ``num_samples``."""

REPLAY = "replay"
"""Name of the stored part with the groups that were trained on again: ``trajectories/replay-000005.parquet``."""

STRATA = 5
"""Equal parts of the range of success, of which ``stratified`` takes alike."""


def newest(args: Config, buffer: list[Group], num_samples: int) -> list[Group]:
    """Those that were trained on last."""
    return buffer[-num_samples:]


def best(args: Config, buffer: list[Group], num_samples: int) -> list[Group]:
    """Those with the highest mean reward; of equals the newer ones."""
    return sorted(reversed(buffer), key=_reward, reverse=True)[:num_samples]


def prioritized(args: Config, buffer: list[Group], num_samples: int) -> list[Group]:
    """Drawn by how much they taught when they were trained on last, the mean size of their advantages
    (https://arxiv.org/abs/1511.05952, equation 1 with alpha = 1). Those that taught nothing come last."""
    taught = np.array([np.mean([abs(t.advantage or 0.0) for t in group.trajectories]) for group in buffer])
    # Without replacement: the largest of Gumbel noise + log weight (https://arxiv.org/abs/1903.06059).
    keys = np.log(np.maximum(taught, 1e-9)) + _random(args, buffer).gumbel(size=len(buffer))
    return [buffer[i] for i in np.argsort(-keys)[:num_samples]]


def stratified(args: Config, buffer: list[Group], num_samples: int) -> list[Group]:
    """As many of each fifth of the range of success as can be, drawn at random within it."""
    strata: list[list[Group]] = [[] for _ in range(STRATA)]
    for i in _random(args, buffer).permutation(len(buffer)):
        strata[min(int(_success(buffer[i]) * STRATA), STRATA - 1)].append(buffer[i])
    turns = [group for rank in range(len(buffer)) for stratum in strata for group in stratum[rank : rank + 1]]
    return turns[:num_samples]


def _random(args: Config, buffer: list[Group]) -> np.random.Generator:
    """The same for the same buffer, so that a run that goes on draws what it would have drawn."""
    return np.random.default_rng([args.seed, zlib.crc32("".join(group.group_id for group in buffer).encode())])


def _reward(group: Group) -> float:
    scored = [reward_of(e) for e in by_episode(group.trajectories) if not is_error(e)]
    return math.fsum(scored) / len(scored) if scored else -math.inf


def _success(group: Group) -> float:
    scored = [solved(e) for e in by_episode(group.trajectories) if not is_error(e)]
    return sum(scored) / len(scored) if scored else 0.0


BUFFER_FILTERS: dict[str, BufferFilter] = {f.__name__: f for f in (newest, best, prioritized, stratified)}


def load_buffer_filter(spec: str) -> BufferFilter:
    """The filter of a name, or a function by path: what that raises, or returns that is none of the buffer, is an
    EnvError that names it. Raises ConfigError: there is none of this name."""
    if spec in BUFFER_FILTERS:
        return BUFFER_FILTERS[spec]
    form = "takes (args, buffer, num_samples) and returns groups of the buffer"
    function = own_function("--buffer-filter-path", spec, BUFFER_FILTERS, form)
    return choosing(function, f"--buffer-filter-path {spec}", "groups", least=0)


class Experience:
    """The groups of the last rollouts, for batches to come. They are in the account no longer, since they were trained.

    Args:
        cfg: says how many groups of a batch are taken from here, of how many rollouts, and by which filter.
    """

    def __init__(self, cfg: Config):
        self._cfg, self._rollouts = cfg, cfg.replay_buffer_size
        self.number = cfg.replayed_groups
        self._filter = load_buffer_filter(cfg.buffer_filter_path)
        self._groups: dict[str, tuple[int, Group]] = {}
        self._first: int | None = None

    def number_at(self, step: int) -> int:
        """How many groups the batch of ``step`` is to have from here: none where it is the first."""
        self._first = step if self._first is None else min(self._first, step)
        return self.number if step > self._first or self._groups else 0

    def pick(self, step: int, oldest: float) -> list[Group]:
        """Groups for the batch of ``step``, oldest first: none with a token that is more than ``oldest`` versions old.
        What they were trained with before is no longer in them."""
        there = [group for _, group in self._groups.values() if step - oldest_version(group.trajectories) <= oldest]
        wanted = min(self.number_at(step), len(there))
        chosen = {id(group) for group in self._filter(self._cfg, there, wanted)} if wanted else set()
        groups = [group for group in there if id(group) in chosen]
        for group in groups:
            forget_training(group.trajectories)
        return groups

    def add(self, step: int, groups: Iterable[Group], again: Iterable[Group] = ()) -> None:
        """These were trained on in rollout ``step`` for the first time, others ``again``. The oldest rollout goes."""
        for group in groups:
            forget_training(group.trajectories, advantage=False)
            self._groups[group.group_id] = step, group
        for group in again:
            forget_training(group.trajectories, advantage=False)
            if group.group_id in self._groups:
                self._groups[group.group_id] = self._groups[group.group_id][0], group
        self._groups = {name: (at, group) for name, (at, group) in self._groups.items() if at > step - self._rollouts}

    def load(self, store: TrajectoryStore, step: int) -> None:
        """What was here after ``step`` rollouts of a run, from its stored trajectories. Raises DataError."""
        for number in range(max(0, step - self._rollouts), step):
            groups = by_group(store.read("train", step=number))
            trained = [group for group in groups if any(t.advantage is not None for t in group.trajectories)]
            self.add(number, trained, by_group(store.read(REPLAY, step=number)))
