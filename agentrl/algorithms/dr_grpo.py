"""GRPO without its two biases."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.group import GroupAlgorithm, centred


class DrGRPO(GroupAlgorithm):
    """Reward less the mean of the group, neither divided by its standard deviation nor by the length of an answer
    (Dr. GRPO, "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.1 and equation 2).

    The loss of a trajectory is the sum over its tokens divided by ``--loss-scale-factor``.
    """

    name = "dr_grpo"
    aggregation = "seq-mean-token-sum-norm"

    def compare(self, returns: np.ndarray) -> np.ndarray:
        return centred(returns)
