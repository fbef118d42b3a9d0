"""Loss terms on per-token log-probabilities. Knows no model, no parallelism and no algorithm.

Every term is a masked sum over sampled tokens divided by their number in the whole optimizer step,
which is known before the step. So the loss is one mean over tokens, and how they are cut into
micro-batches, packed or laid out over ranks does not enter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import ConfigError

KL_TYPES = ("k2", "k3", "low_var_kl")

SUMS = (
    "tokens", "loss", "pg_loss", "kl_loss", "entropy", "clip_fraction", "ppo_kl",
    "mismatch", "mismatch_kl", "weight", "weight_squared",
)  # fmt: skip
"""Names of what :func:`token_loss` sums, in the order of its vector."""


@dataclass(frozen=True)
class LossOptions:
    """What the loss is made of.

    ``eps_clip`` and ``eps_clip_high``: the ratio is clipped to [1 - low, 1 + high].
    ``kl_loss_coef`` 0 turns the KL term off, ``entropy_coef`` 0 the entropy bonus.
    """

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kl_loss_type not in KL_TYPES:
            raise ConfigError(f"--kl-loss-type {self.kl_loss_type!r} is not one of {', '.join(KL_TYPES)}")
        if not 0 < self.eps_clip <= 1 or self.clip_high <= 0:
            raise ConfigError(
                f"--eps-clip {self.eps_clip} and --eps-clip-high {self.eps_clip_high}: the first must lie "
                "between 0 and 1, the second above 0 (default: the first)"
            )

    @property
    def clip_high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7), bounds apart (DAPO, arXiv:2503.14476).

    ``-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)`` with
    ``ratio = exp(logprobs - old_logprobs)``.

    Args:
        logprobs, old_logprobs, advantages: float[N], one entry a sampled token.

    Returns:
        Loss float[N], and bool[N]: where the clipped branch is the smaller one (no gradient).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy, float[N].

    With d = logprobs - ref_logprobs: k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html). ``low_var_kl`` is k3 with d limited to [-20, 20]
    and the outcome to [-10, 10], so that one odd token cannot take over a step.

    There is no k1 = d: as a loss its gradient is that of the log-probability alone, whose expectation
    under the policy is 0, so it adds noise and pulls nowhere.
    """
    d = logprobs - ref_logprobs
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.expm1(-d) + d
    if kind == "low_var_kl":
        d = d.clamp(-20, 20)
        return (torch.expm1(-d) + d).clamp(-10, 10)
    raise ConfigError(f"--kl-loss-type {kind!r} is not one of {', '.join(KL_TYPES)}")


def token_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    advantages: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the loss over the sampled tokens of one micro-batch.

    Args:
        logprobs: float32[N] of the model in training, with gradient.
        entropy: float32[N] of its next-token distribution (with gradient where
            ``options.entropy_coef`` is not 0), or None: then the metric is the one-sample
            estimate -logprobs.
        advantages, old_logprobs, rollout_logprobs: float32[N].
        ref_logprobs: float32[N], needed where ``options.kl_loss_coef`` is not 0.

    Returns:
        The sum, to be divided by the number of sampled tokens in the step; float64[len(SUMS)] of
        sums for metrics; the largest |logprobs - rollout_logprobs|.
    """
    pg, clipped = clipped_surrogate(
        logprobs, old_logprobs, advantages, eps_low=options.eps_clip, eps_high=options.clip_high
    )
    total = pg_sum = pg.sum()
    kl_sum = None
    if options.kl_loss_coef:
        if ref_logprobs is None:
            raise ConfigError("a KL loss needs reference log-probabilities; set --ref-load or --hf-checkpoint")
        kl_sum = kl_estimate(logprobs, ref_logprobs, options.kl_loss_type).sum()
        total = total + options.kl_loss_coef * kl_sum
    if options.entropy_coef:
        if entropy is None:
            raise ConfigError("an entropy bonus needs the entropy of the model")
        total = total - options.entropy_coef * entropy.sum()
    with torch.no_grad():
        lp = logprobs.detach()
        d = lp - rollout_logprobs
        weight = torch.exp(d)
        zero = lp.new_zeros(())
        sums = torch.stack(
            [
                zero + lp.numel(),
                total.detach(),
                pg_sum.detach(),
                zero if kl_sum is None else kl_sum.detach(),
                (-lp if entropy is None else entropy.detach()).sum(),
                clipped.sum(),
                (old_logprobs - lp).sum(),
                d.abs().sum(),
                (torch.expm1(d) - d).sum(),
                weight.sum(),
                weight.square().sum(),
            ]
        ).double()
        largest = d.abs().max() if d.numel() else zero
    return total, sums, largest


MISMATCH = ("train/logprob_abs_diff_mean", "train/logprob_abs_diff_max", "train/rollout_kl", "train/ess")
"""Metrics that compare the trainer with the engine."""


def metrics_from_sums(sums: dict[str, float], largest: float) -> dict[str, float]:
    """Means over the tokens of a step from the sums of :func:`token_loss`.

    ``logprob_abs_diff_*``, ``rollout_kl`` and ``ess`` compare the trainer's log-probabilities (before the
    update) with those the engine gave: mean and largest |difference|, the k3 estimate of
    KL(engine || trainer), and the effective sample size of the importance weights as a share of
    the tokens (1 = on policy).
    """
    n = max(sums["tokens"], 1.0)
    mean = {name: sums[name] / n for name in SUMS}
    squares = sums["weight_squared"]
    return {
        "train/loss": mean["loss"],
        "train/pg_loss": mean["pg_loss"],
        "train/kl_loss": mean["kl_loss"],
        "train/entropy": mean["entropy"],
        "train/clip_fraction": mean["clip_fraction"],
        "train/ppo_kl": mean["ppo_kl"],
        "train/logprob_abs_diff_mean": mean["mismatch"],
        "train/logprob_abs_diff_max": largest,
        "train/rollout_kl": mean["mismatch_kl"],
        "train/ess": sums["weight"] ** 2 / (n * squares) if squares > 0 else 1.0,
        "train/sampled_tokens": sums["tokens"],
    }
