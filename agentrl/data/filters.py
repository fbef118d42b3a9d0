"""Which groups of a rollout are trained on: ``--dynamic-sampling-filter-path``."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from agentrl.data.episodes import by_episode, is_error, reward_of, solved
from agentrl.data.rules import named, own_function
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Group

FLAG = "--dynamic-sampling-filter-path"
Filter = Callable[[Group], bool]

_BAND = re.compile(r"success_band=(\d*\.?\d+),(\d*\.?\d+)")


def reward_variance(group: Group) -> bool:
    """Whether two of its episodes earned different rewards: otherwise a baseline of the group leaves no advantage
    (dynamic sampling, https://arxiv.org/abs/2503.14476, section 3.2)."""
    episodes = [e for e in by_episode(group.trajectories) if not is_error(e)]
    return len({reward_of(e) for e in episodes}) > 1


def success_band(low: float, high: float) -> Filter:
    """Whether the share of its episodes that solved the task is within ``[low, high]``."""

    def within(group: Group) -> bool:
        episodes = [e for e in by_episode(group.trajectories) if not is_error(e)]
        return bool(episodes) and low <= sum(map(solved, episodes)) / len(episodes) <= high

    return within


def load_filter(spec: str) -> Filter:
    """The filter of a name, ``reward_variance`` or ``success_band=LOW,HIGH``, or a function ``(group) -> bool`` by
    path. What that raises, or returns that is no bool, is an EnvError that names it. Raises ConfigError: there is none
    of this name, or the band is none."""
    if spec == "reward_variance":
        return reward_variance
    if spec.startswith("success_band"):
        given = _BAND.fullmatch(spec)
        low, high = map(float, given.groups()) if given else (1.0, 0.0)
        if not low <= high <= 1.0:
            raise ConfigError(
                f"{FLAG} {spec}: expected success_band=LOW,HIGH with 0 <= LOW <= HIGH <= 1, such as "
                "success_band=0.2,0.8"
            )
        return success_band(low, high)
    known = ("reward_variance", "success_band=LOW,HIGH")
    function = own_function(FLAG, spec, known, "takes an agentrl.Group and returns True to keep it")

    def own(group: Group) -> bool:
        with named(f"{FLAG} {spec}, group {group.group_id}"):
            kept = function(group)
        if not isinstance(kept, (bool, np.bool_)):
            raise EnvError(f"{FLAG} {spec} returned {kept!r:.80}; expected True or False")
        return bool(kept)

    return own
