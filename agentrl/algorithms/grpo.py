"""Group-relative advantages."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.group import GroupAlgorithm, centred, normalized


class GRPO(GroupAlgorithm):
    """Reward against the mean of the group (DeepSeekMath, arXiv:2402.03300, section 4.1.2, outcome supervision).

    With the rewards r of a group, a member's advantage is ``(r_i - mean(r)) / (std(r) + 1e-6)``; ``std`` is the
    sample standard deviation (divisor n - 1). ``--no-grpo-std-normalization`` leaves the division out. Where all
    rewards of a group are equal, advantages are exactly 0 and its members stay in the batch. All segments of a
    trajectory share its advantage.
    """

    name = "grpo"

    def compare(self, returns: np.ndarray) -> np.ndarray:
        return normalized(returns) if self.options.grpo_std_normalization else centred(returns)
