"""From terms of tokens to one number: a weight a token, over all sampled tokens of an optimizer step.

The weights are made once a step, before it is cut into ranks and micro-batches. So nothing else counts tokens, and how
the batch is cut does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentrl.algorithms.batch import TrainBatch
from agentrl.errors import ConfigError


def token_mean(trajectory: np.ndarray) -> np.ndarray:
    """Every sampled token alike (DAPO, arXiv:2503.14476, equation 8). ``trajectory`` int[N]: whose each is."""
    return np.full(len(trajectory), 1 / len(trajectory))


def sequence_mean(trajectory: np.ndarray) -> np.ndarray:
    """Every trajectory alike, and its tokens alike (GRPO, arXiv:2402.03300, equation 3)."""
    _, which, count = np.unique(trajectory, return_inverse=True, return_counts=True)
    return 1 / (len(count) * count[which])


AGGREGATIONS = {f.__name__: f for f in (token_mean, sequence_mean)}


def aggregate(
    batch: TrainBatch, samples: Sequence[int], how: str | Callable[[np.ndarray], np.ndarray] = "token_mean"
) -> np.ndarray:
    """float64[T]: the weight of each sampled token of these sequences, 0 elsewhere. The shipped ones sum to 1.

    Raises:
        ConfigError: ``how`` is none of :data:`AGGREGATIONS`, or nothing was sampled.
    """
    if isinstance(how, str) and how not in AGGREGATIONS:
        raise ConfigError(f"aggregation {how!r} is not one of {', '.join(AGGREGATIONS)}, and no function")
    chosen = np.zeros(len(batch), bool)
    chosen[list(samples)] = True
    at = np.flatnonzero(chosen[batch.sequence] & (batch.loss_mask == 1))
    if not len(at):
        raise ConfigError(f"an optimizer step of {len(samples)} sequences has no sampled token")
    weights = np.zeros(batch.num_tokens)
    weights[at] = (AGGREGATIONS[how] if isinstance(how, str) else how)(batch.trajectory[at])
    return weights
