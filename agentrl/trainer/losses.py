"""Loss terms on the sampled tokens of a micro-batch. Knows no model, no parallelism and no algorithm.

An algorithm names its terms. Each is a number a token; the loss of an optimizer step is their sum over its tokens,
weighted by the column ``weight`` (:mod:`agentrl.algorithms.aggregation`), which was made before the step was cut. So
how tokens are cut into micro-batches, packed or laid out over ranks does not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms import Algorithm
from agentrl.algorithms.kl import IN_LOSS, kl_estimate
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError
from agentrl.loading import load_object


@dataclass(frozen=True)
class Tokens:
    """N sampled tokens of a micro-batch.

    Args:
        logprobs: float32[N] of the model in training, with gradient.
        entropy: float32[N] of its next-token distribution, with gradient; None where no term asks for it.
        columns: those of :class:`~agentrl.trainer.batch.MicroBatch` as tensors [N].
    """

    logprobs: Tensor
    entropy: Tensor | None
    columns: Mapping[str, Tensor]

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise ConfigError(
                f"a loss term asks for {column!r}, which is not there; there are {', '.join(self.columns)}. What the "
                "trainer infers before the update is named in the algorithm's `needs`"
            )
        return self.columns[column]

    @property
    def log_ratio(self) -> Tensor:
        """log(policy / old policy), float32[N] with gradient: of the token, or of its trajectory where the algorithm
        has a ``sequence_ratio``. Without a column ``old`` the model as it stands is the old policy."""
        if "log_ratio" in self.columns:
            return self.columns["log_ratio"] + (self.logprobs - self.logprobs.detach())
        return self.log_ratio_of_tokens

    @property
    def log_ratio_of_tokens(self) -> Tensor:
        """log(policy / old policy) of each token, whatever the algorithm."""
        return self.logprobs - self.columns.get("old", self.logprobs.detach())


@dataclass(frozen=True)
class Term:
    """One term of the loss.

    Args:
        metric: reported as ``train/<metric>``, the weighted mean of ``values``.
        values: float32[N] with gradient.
        coef: what the term counts for in the loss.
        metrics: further numbers a token, [N], reported as means.
    """

    metric: str
    values: Tensor
    coef: float = 1.0
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


TermFunction = Callable[[Tokens, AlgorithmOptions], Term | None]


def clipped_surrogate(tokens: Tokens, options: AlgorithmOptions) -> Term:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7), bounds apart (DAPO, arXiv:2503.14476).

    ``-min(ratio * A, clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A)``, times the column ``correction`` if there.
    With ``--eps-clip-c`` at most ``-eps_clip_c * A`` where A is negative (dual clip, arXiv:1912.09729, equation 5).
    """
    ratio, advantage = torch.exp(tokens.log_ratio), tokens["advantage"]
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - options.eps_clip, 1 + _eps_clip_high(options))
    values, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped
    if options.eps_clip_c is not None:
        largest = torch.where(advantage < 0, -advantage * options.eps_clip_c, torch.inf)
        values, is_clipped = torch.minimum(values, largest), is_clipped | (largest < values)
    if "correction" in tokens.columns:
        values = values * tokens["correction"]
    return Term("pg_loss", values, metrics={"clip_fraction": is_clipped})


def clipped_weights(tokens: Tokens, options: AlgorithmOptions) -> Term:
    """CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5): ``-clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A *
    log(policy)``; the ratio has no gradient. Times the column ``correction`` if there."""
    ratio = torch.exp(tokens.log_ratio.detach())
    clipped = ratio.clamp(1 - options.eps_clip, 1 + _eps_clip_high(options))
    values = -clipped * tokens["advantage"] * tokens.logprobs * tokens.columns.get("correction", 1.0)
    return Term("pg_loss", values, metrics={"clip_fraction": clipped != ratio})


def _eps_clip_high(options: AlgorithmOptions) -> float:
    return options.eps_clip if options.eps_clip_high is None else options.eps_clip_high


def nll(tokens: Tokens, options: AlgorithmOptions) -> Term:
    """Negative log-likelihood, times the advantage: ``-A * log(policy)``."""
    return Term("nll", -tokens["advantage"] * tokens.logprobs)


def kl(tokens: Tokens, options: AlgorithmOptions) -> Term | None:
    """``--kl-loss-coef`` times the estimate of KL(policy || reference), with ``--use-kl-loss``.

    With ``--use-unbiased-kl`` times the token's ratio, through which the gradient goes, too: then its mean over tokens
    of the old policy is the divergence of the new one, and so is its gradient (DeepSeek-V3.2, arXiv:2512.02556,
    section 3.1). Without it k1 would have no gradient in the mean, and k3 that of KL(reference || policy).
    """
    if not (options.use_kl_loss and options.kl_loss_coef):
        return None
    values = kl_estimate(tokens.logprobs - tokens["ref"], options.kl_loss_type or IN_LOSS, torch.expm1)
    if options.use_unbiased_kl:
        values = values * torch.exp(tokens.log_ratio_of_tokens)
    return Term("kl_loss", values, options.kl_loss_coef)


def entropy(tokens: Tokens, options: AlgorithmOptions) -> Term | None:
    """Minus ``--entropy-coef`` times the entropy of the next token."""
    if not options.entropy_coef:
        return None
    if tokens.entropy is None:
        raise ConfigError("an entropy bonus needs the entropy of the model")
    return Term("entropy", tokens.entropy, -options.entropy_coef)


TERMS: dict[str, TermFunction] = {f.__name__: f for f in (clipped_surrogate, clipped_weights, nll, kl, entropy)}


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Term:
    """The critic's squared error, half of it, with a value (float32[N], with gradient) that moves by more than ``clip``
    from what it was before the update (``old``) counted as if it had stopped there, where that is worse
    (arXiv:2005.12729, section 3). 0: no clip."""
    error = (values - returns).square()
    if not clip:
        return Term("value_loss", 0.5 * error, metrics={"value_clip_fraction": torch.zeros_like(error)})
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    stopped = (clipped > error) & ((values - old).abs() > clip)  # within, the two differ by rounding
    return Term("value_loss", 0.5 * torch.maximum(error, clipped), metrics={"value_clip_fraction": stopped})


class Loss:
    """The terms of an algorithm as one loss; with ``--custom-loss-function-path`` that function in place of its policy
    term.
    Raises ConfigError: a term is neither one of :data:`TERMS` nor a method of the algorithm."""

    def __init__(self, algorithm: Algorithm, options: AlgorithmOptions):
        self._options = options
        self._terms: list[TermFunction] = []
        names = algorithm.terms
        if options.custom_loss_function_path:
            self._terms.append(load_object(options.custom_loss_function_path, "--custom-loss-function-path"))
            names = tuple(name for name in names if name in ("kl", "entropy"))
        for name in names:
            term = getattr(algorithm, name, None) or TERMS.get(name)
            if term is None:
                raise ConfigError(
                    f"--advantage-estimator {algorithm.name}: its loss term {name!r} is neither one of "
                    f"{', '.join(TERMS)} nor a method of the class"
                )
            self._terms.append(term)
        self.wants_entropy = "entropy" in names and options.entropy_coef != 0

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss of a micro-batch, a weighted sum over its tokens; weighted sums for :func:`metrics_of`, float64; the
        largest |log-probability of the trainer - of the engine|, 0 where no engine is compared with."""
        weight = tokens["weight"]
        total = weight.new_zeros(())
        means: dict[str, Tensor] = {}
        terms = [term for function in self._terms if (term := function(tokens, self._options)) is not None]
        for term in terms:
            total = total + term.coef * (weight * term.values).sum()
            means |= {term.metric: term.values, **term.metrics}
        if "opsm_masked" in tokens.columns:
            means["opsm_masked"] = tokens["opsm_masked"]
        with torch.no_grad():
            d = tokens.logprobs.new_zeros(())
            if "rollout" in tokens.columns:
                d = tokens.logprobs.detach() - tokens["rollout"]
                ratio = torch.exp(d)
                # The one-sample estimate, where no term has the exact one.
                means.setdefault("entropy", -tokens.logprobs)
                means |= {
                    "ppo_kl": -tokens.log_ratio,
                    "logprob_abs_diff_mean": d.abs(),
                    "rollout_kl": torch.expm1(d) - d,
                    "importance": ratio,
                    "importance_squared": ratio.square(),
                }
            weight = weight.double()
            sums = {name: (weight * values.detach().double()).sum() for name, values in means.items()}
            sums["loss"] = weight.new_zeros(()) + sum(term.coef * sums[term.metric] for term in terms)
            sums |= {"weight": weight.sum(), "sampled_tokens": weight.new_tensor(tokens.logprobs.numel())}
            return total, sums, d.abs().max() if d.numel() else d.new_zeros(())

    def names(self, columns: Mapping[str, np.ndarray]) -> list[str]:
        """Names of the sums, the same on every rank, also one that has no last layer: those of no token, which has
        these columns."""
        none = {name: torch.from_numpy(np.empty(0, values.dtype)) for name, values in columns.items()}
        return list(self(Tokens(torch.zeros(0), torch.zeros(0), none))[1])


MISMATCH = ("train/logprob_abs_diff_mean", "train/logprob_abs_diff_max", "train/rollout_kl", "train/ess")
"""Metrics that compare the trainer with the engine."""


def metrics_of(sums: Mapping[str, float], largest: float, scale: float) -> dict[str, float]:
    """Metrics of an optimizer step from the sums of :class:`Loss`.

    ``logprob_abs_diff_*``, ``rollout_kl`` and ``ess`` compare the trainer's log-probabilities (before the
    update) with those the engine gave: mean and largest |difference|, the k3 estimate of
    KL(engine || trainer), and the effective sample size of the importance weights as a share of
    the tokens (1 = on policy). Of tokens that no engine sampled there are none of these.

    Args:
        scale: factor in the weights that is not part of the loss.
    """
    rest = dict(sums)
    weight, loss, tokens = rest.pop("weight"), rest.pop("loss"), rest.pop("sampled_tokens")
    mean = {name: value / weight if weight else 0.0 for name, value in rest.items()}
    compared = {}
    if "importance" in mean:
        squared, importance = mean.pop("importance_squared"), mean.pop("importance")
        ess = importance**2 / squared if squared > 0 else 1.0
        compared = {"train/logprob_abs_diff_max": largest, "train/ess": ess}
    metrics = {f"train/{name}": value for name, value in mean.items()} | compared
    return metrics | {"train/loss": loss / scale, "train/sampled_tokens": tokens}
