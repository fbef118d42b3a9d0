"""Supervised fine-tuning."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.base import Algorithm
from agentrl.algorithms.batch import TrainBatch


class SFT(Algorithm):
    """``--loss-type sft_loss``: the negative log-likelihood of tokens that are to be learned, each with credit 1.

    The tokens are those of written turns, or of stored trajectories; whoever wrote them, the policy's own
    log-probabilities before the step have no part in the loss.
    """

    name = "sft_loss"
    terms = ("nll",)

    def credit(self, batch: TrainBatch) -> np.ndarray:
        return np.ones(batch.num_tokens)
