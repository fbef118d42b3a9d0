"""Weights and masks for tokens that another policy sampled: the engine's arithmetic, or older weights.

The ratio is trainer ÷ engine, ``exp(old - rollout)``, of log-probabilities under the weights before the step: of a
token, of its trajectory (the product), or the geometric mean over its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from agentrl.algorithms.batch import TrainBatch

if TYPE_CHECKING:
    from agentrl.config.schema import AlgorithmOptions

Level = Literal["token", "sequence", "geometric"]


def ratio(batch: TrainBatch, level: Level) -> np.ndarray:
    """float64[T]: trainer ÷ engine on each sampled token, 1 elsewhere. Logarithms are limited to [-20, 20]."""
    d = (batch["old"].astype(np.float64) - batch["rollout"]) * batch.loss_mask
    if level != "token":
        d = (batch.sums(d) if level == "sequence" else batch.means(d))[batch.trajectory] * batch.loss_mask
    return np.exp(d.clip(-20, 20))


def importance_weights(batch: TrainBatch, options: AlgorithmOptions) -> np.ndarray:
    """float64[T], with ``--use-tis``. ``truncate``: the ratio limited to [tis_clip_low, tis_clip] (truncated importance
    sampling, https://fengyao.notion.site/off-policy-rl). ``mask``: the ratio inside these bounds, 0 outside (IcePop,
    https://ringtech.notion.site/icepop)."""
    weights, low, high = ratio(batch, options.tis_level), options.tis_clip_low, options.tis_clip
    if options.tis_mode == "truncate":
        return weights.clip(low, high)
    return np.where((weights >= low) & (weights <= high), weights, 0.0)


def accepted(batch: TrainBatch, options: AlgorithmOptions) -> np.ndarray:
    """bool[R], with ``--use-rs``: trajectories whose ratio is within [rs_lower_bound, rs_upper_bound]; at the level
    ``token``, that of every token."""
    ratios = ratio(batch, options.rs_level)
    outside = (ratios < options.rs_lower_bound) | (ratios > options.rs_upper_bound)
    return batch.sums(outside) == 0


def correction(batch: TrainBatch, options: AlgorithmOptions) -> np.ndarray | None:
    """float64[T]: the factor of each token's policy term; None where neither is asked for. A 0 stays in the counts of
    the loss, so that what is left is not blown up."""
    if not (options.use_tis or options.use_rs):
        return None
    weights = importance_weights(batch, options) if options.use_tis else np.ones(batch.num_tokens)
    return weights * accepted(batch, options)[batch.trajectory] if options.use_rs else weights


def too_far(batch: TrainBatch, options: AlgorithmOptions) -> np.ndarray:
    """bool[T], with ``--use-opsm``: sampled tokens with a negative advantage in trajectories on which the policy has
    gone from the one that sampled by more than ``opsm_delta``, the mean of ``rollout`` - ``current`` over its tokens
    (off-policy sequence masking: DeepSeek-V3.2, arXiv:2512.02556, section 3.1, where they have M = 0)."""
    apart = batch.means(batch["rollout"].astype(np.float64) - batch["current"])
    negative = (batch["advantage"] < 0) & (batch.loss_mask == 1)
    return negative & (apart > options.opsm_delta)[batch.trajectory]


def correction_metrics(batch: TrainBatch, options: AlgorithmOptions) -> dict[str, float]:
    """``train/tis_mean``, ``train/tis_clipped`` (share of sampled tokens outside the bounds), ``train/rs_rejected``
    (share of trajectories)."""
    metrics: dict[str, float] = {}
    if options.use_tis:
        sampled, ratios = batch.loss_mask == 1, ratio(batch, options.tis_level)
        outside = (ratios < options.tis_clip_low) | (ratios > options.tis_clip)
        metrics["train/tis_mean"] = float(importance_weights(batch, options)[sampled].mean())
        metrics["train/tis_clipped"] = float(outside[sampled].mean())
    if options.use_rs:
        metrics["train/rs_rejected"] = float(1 - accepted(batch, options).mean())
    return metrics
