"""Credit by comparison: the returns of a group's members against each other."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from agentrl.algorithms.base import Algorithm
from agentrl.algorithms.batch import TrainBatch

EPS = 1e-6


class GroupAlgorithm(Algorithm):
    """Give :meth:`compare`. A return is of a trajectory, or with ``--credit-level turn`` of each of its turns, and
    those of equal number are compared (see :meth:`Algorithm.rewards_to_go`)."""

    compares: ClassVar[bool] = True

    def compare(self, returns: np.ndarray) -> np.ndarray:
        """Advantages of the members of one group, of the shape of their returns, float64[n, turns]."""
        raise NotImplementedError(f"{type(self).__name__} has no compare(returns)")

    def credit(self, batch: TrainBatch) -> np.ndarray:
        return batch.spread(self.compared(batch, self.rewards_to_go(batch)))

    def compared(self, batch: TrainBatch, returns: np.ndarray) -> np.ndarray:
        """:meth:`compare` of each group, float64[R, turns]."""
        advantages = np.zeros_like(returns)
        for group in range(batch.group_of.max(initial=-1) + 1):
            members = batch.group_of == group
            advantages[members] = self.compare(returns[members])
        return advantages


def centred(returns: np.ndarray) -> np.ndarray:
    """Returns of a group less their mean, turn by turn; exactly 0 where all are equal, as the mean of equal floats need
    not equal them."""
    return np.where(np.ptp(returns, axis=0) == 0, 0.0, returns - returns.mean(axis=0))


def normalized(returns: np.ndarray) -> np.ndarray:
    """The same, divided by the sample standard deviation (divisor n - 1) and 1e-6."""
    return centred(returns) / (returns.std(axis=0, ddof=1) + EPS)
