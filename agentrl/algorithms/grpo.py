"""Advantages: from rewards of groups to one number a trajectory. Pure numpy, no torch, no Ray.

Everything is keyed by ids. The order of groups, of trajectories in them, or how many of them came
back has no influence on what a trajectory gets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from agentrl.errors import DataError
from agentrl.types import Group, Outcome, StopReason, Trajectory

GRPO_EPS = 1e-6


def trainable(trajectory: Trajectory) -> bool:
    """Whether a trajectory may enter a baseline and a loss.

    Infrastructure errors may not: their reward says nothing about the policy. Neither may an episode whose
    time ran out because the engine was slow, nor a trajectory in which the model sampled nothing.
    """
    theirs = trajectory.outcome is Outcome.INFRA_ERROR or trajectory.stop_reason is StopReason.ENGINE_TIMEOUT
    return not theirs and trajectory.num_sampled > 0


def grpo(groups: Iterable[Group], *, normalize_std: bool = True, eps: float = GRPO_EPS) -> dict[str, float]:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2, outcome supervision).

    With the rewards r of the trainable members of a group, a member's advantage is
    ``(r_i - mean(r)) / (std(r) + eps)``; ``std`` is the sample standard deviation (divisor n - 1).
    ``normalize_std=False`` leaves the division out (Dr. GRPO, arXiv:2503.20783, equation 2).

    Defined edge cases:

    - where several agents play (``MultiAgentEnv``), each is compared with itself: the trajectories of an agent
      carry a group id of their own, ``<group>/<agent>``;
    - what is not :func:`trainable` gets no advantage and enters no mean;
    - all rewards of a group equal: advantages are exactly 0, the members stay in the batch;
    - fewer than two trainable members: no baseline exists, so the group gets no advantages.

    Args:
        groups: finished groups. What is compared is trajectories of one ``group_id``, in whatever ``Group``s.
        normalize_std: divide by the standard deviation of the group.
        eps: added to the standard deviation.

    Returns:
        ``trajectory_id -> advantage``. A trajectory that is not in it is not trained on. All
        segments of a trajectory share its advantage.

    Raises:
        DataError: a reward is not finite, or a trajectory id occurs twice.
    """
    members: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            if trainable(trajectory):
                members[trajectory.group_id].append(trajectory)
    advantages: dict[str, float] = {}
    for trajectories in members.values():
        _check_rewards(trajectories)
        if len(trajectories) < 2:
            continue
        rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
        # Equal rewards must give exact zeros; the mean of equal floats need not equal them.
        centred = rewards - rewards.mean() if np.ptp(rewards) > 0 else np.zeros_like(rewards)
        if normalize_std:
            centred = centred / (rewards.std(ddof=1) + eps)
        for trajectory, value in zip(trajectories, centred, strict=True):
            if trajectory.trajectory_id in advantages:
                raise DataError(
                    f"trajectory id {trajectory.trajectory_id!r} occurs twice in one batch; ids must "
                    "be unique over all groups, or one trajectory would be trained on twice"
                )
            advantages[trajectory.trajectory_id] = float(value)
    return advantages


def zero_variance_fraction(advantages: dict[str, float]) -> float:
    """Share of trajectories whose advantage is exactly 0, which teach nothing (0 when empty)."""
    if not advantages:
        return 0.0
    return sum(value == 0.0 for value in advantages.values()) / len(advantages)


def _check_rewards(trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        if not math.isfinite(trajectory.reward):
            raise DataError(
                f"reward of trajectory {trajectory.trajectory_id!r} is {trajectory.reward!r}, expected a "
                "finite number; end such an episode with stop_reason=ENV_ERROR so that it is left out"
            )
