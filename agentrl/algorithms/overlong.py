"""Episodes that grow too long: ``--overlong-handling``. Lengths are sampled tokens of a trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentrl.algorithms.batch import TrainBatch

if TYPE_CHECKING:
    from agentrl.config.schema import AlgorithmOptions


def penalty(batch: TrainBatch, options: AlgorithmOptions) -> np.ndarray:
    """float64[R]: what ``penalty`` takes from each reward (DAPO, arXiv:2503.14476, equation 13): nothing up to
    ``overlong_max_len - overlong_buffer_len`` tokens, then in proportion, the whole factor from ``overlong_max_len``
    on."""
    if options.overlong_handling != "penalty" or not (options.overlong_max_len and options.overlong_buffer_len):
        return np.zeros(batch.num_trajectories)
    free = options.overlong_max_len - options.overlong_buffer_len
    over = (batch.sums(np.ones(batch.num_tokens)) - free) / options.overlong_buffer_len
    return options.overlong_penalty_factor * over.clip(0, 1)


def in_loss(batch: TrainBatch, options: AlgorithmOptions) -> np.ndarray | None:
    """uint8[T]: 0 on trajectories that a budget ended, with ``mask``: they are compared, and then in no loss and no
    count of it (DAPO, section 3.4, "overlong filtering"). None: all are."""
    if options.overlong_handling != "mask":
        return None
    return (~batch.truncated[batch.trajectory]).astype(np.uint8)
