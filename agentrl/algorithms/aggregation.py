"""From terms of tokens to one number: a weight a token, over all tokens of an optimizer step that are in the loss.

The weights are made once a step, before it is cut into ranks and micro-batches. So nothing else counts tokens, and how
the batch is cut does not change the result. A sequence in the names below is a trajectory, with all its segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentrl.algorithms.batch import TrainBatch
from agentrl.errors import ConfigError


def token_mean(trajectory: np.ndarray, longest: int) -> np.ndarray:
    """Every token alike (DAPO, arXiv:2503.14476, equation 8). ``trajectory`` int[N]: whose each is."""
    return np.full(len(trajectory), 1 / len(trajectory))


def sequence_mean(trajectory: np.ndarray, longest: int) -> np.ndarray:
    """Every trajectory alike, and its tokens alike (GRPO, arXiv:2402.03300, equation 3)."""
    _, which, count = np.unique(trajectory, return_inverse=True, return_counts=True)
    return 1 / (len(count) * count[which])


def constant_length(trajectory: np.ndarray, longest: int) -> np.ndarray:
    """Each trajectory's sum divided by one constant, whatever its length (Dr. GRPO, arXiv:2503.20783, section 3.1)."""
    return np.full(len(trajectory), 1 / (len(np.unique(trajectory)) * longest))


AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": sequence_mean,
    "seq-mean-token-sum-norm": constant_length,
}
"""By verl's names, as ``--loss-agg-mode`` takes them."""


def aggregate(
    batch: TrainBatch,
    samples: Sequence[int],
    how: str | Callable[[np.ndarray], np.ndarray] = "token-mean",
    longest: int | None = None,
) -> np.ndarray:
    """float64[T]: the weight of each token of these sequences that is in the loss (``batch.in_loss``), 0 elsewhere.
    All are 0 where nothing sampled is in the loss.

    Args:
        how: one of :data:`AGGREGATIONS`, or a function from each token's trajectory, int[N], to its weight.
        longest: the constant of ``seq-mean-token-sum-norm``, in tokens.

    Raises:
        ConfigError: ``how`` is none of :data:`AGGREGATIONS`, or nothing was sampled.
    """
    if isinstance(how, str) and how not in AGGREGATIONS:
        raise ConfigError(f"aggregation {how!r} is not one of {', '.join(AGGREGATIONS)}, and no function")
    chosen = np.zeros(len(batch), bool)
    chosen[list(samples)] = True
    of_step = chosen[batch.sequence] & (batch.loss_mask == 1)
    if not of_step.any():
        raise ConfigError(f"an optimizer step of {len(samples)} sequences has no sampled token")
    at = np.flatnonzero(of_step & batch.in_loss)
    weights = np.zeros(batch.num_tokens)
    if not len(at):
        return weights
    if not isinstance(how, str):
        weights[at] = how(batch.trajectory[at])
    elif how == "seq-mean-token-sum-norm" and longest is None:
        raise ConfigError(f"--loss-agg-mode {how} divides by --loss-scale-factor, which is not set")
    else:
        weights[at] = AGGREGATIONS[how](batch.trajectory[at], longest or 1)
    return weights
