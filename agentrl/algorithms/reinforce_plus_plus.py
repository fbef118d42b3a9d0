"""REINFORCE with advantages normalized over the whole batch."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.base import Algorithm
from agentrl.algorithms.batch import TrainBatch
from agentrl.algorithms.group import EPS, GroupAlgorithm, centred


def whitened(batch: TrainBatch, values: np.ndarray) -> np.ndarray:
    """float64[T]: values of the sampled tokens less their mean, divided by their standard deviation and 1e-6; exactly 0
    where all are equal."""
    sampled = values[batch.loss_mask == 1].astype(np.float64)
    if not len(sampled) or np.ptp(sampled) == 0:
        return np.zeros(batch.num_tokens)
    return (values - sampled.mean()) / (sampled.std() + EPS)


class ReinforcePlusPlus(Algorithm):
    """No group and no critic (REINFORCE++, arXiv:2501.03262): the return of each token, normalized over the sampled
    tokens of the batch.

    The return of token t is the reward, less ``kl_coef`` times the KL estimates of the tokens from t on.
    """

    name = "reinforce_plus_plus"

    def credit(self, batch: TrainBatch) -> np.ndarray:
        returns = batch.spread(self.rewards_to_go(batch, kl=False)).astype(np.float64)
        if self.options.kl_coef:
            returns -= self.options.kl_coef * batch.from_here(self.kl_to_reference(batch))
        return whitened(batch, returns)


class ReinforcePlusPlusBaseline(GroupAlgorithm):
    """REINFORCE++ for several episodes a task (arXiv:2501.03262, REINFORCE++-baseline): the reward less the mean of its
    group, then normalized over the sampled tokens of the batch. A group's own spread divides nothing.
    """

    name = "reinforce_plus_plus_baseline"

    def compare(self, returns: np.ndarray) -> np.ndarray:
        return centred(returns)

    def credit(self, batch: TrainBatch) -> np.ndarray:
        return whitened(batch, super().credit(batch))
