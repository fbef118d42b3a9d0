"""Group-relative advantages."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.base import Algorithm
from agentrl.algorithms.batch import TrainBatch

EPS = 1e-6


class GRPO(Algorithm):
    """Reward against the mean of the group (DeepSeekMath, arXiv:2402.03300, section 4.1.2, outcome supervision).

    With the rewards r of a group, a member's advantage is ``(r_i - mean(r)) / (std(r) + 1e-6)``; ``std`` is the
    sample standard deviation (divisor n - 1). ``--no-grpo-std-normalization`` leaves the division out (Dr. GRPO,
    arXiv:2503.20783, equation 2). Where all rewards of a group are equal, advantages are exactly 0 and its members stay
    in the batch. All segments of a trajectory share its advantage.
    """

    name = "grpo"
    compares = True

    def credit(self, batch: TrainBatch) -> np.ndarray:
        rewards, advantages = self.rewards(batch), np.zeros(batch.num_trajectories)
        for group in range(batch.group_of.max(initial=-1) + 1):
            members = batch.group_of == group
            own = rewards[members]
            if np.ptp(own) == 0:  # the mean of equal floats need not equal them
                continue
            centred = own - own.mean()
            advantages[members] = centred / (own.std(ddof=1) + EPS) if self.options.grpo_std_normalization else centred
        return batch.spread(advantages)
