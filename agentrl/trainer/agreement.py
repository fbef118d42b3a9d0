"""Whether engine and trainer compute the same policy.

The trainer computes the log-probability of each sampled token anew. With equal weights and equal mathematics it
differs from the engine's by rounding only: about 1e-6 nats in the mean in fp32, 0.002 to 0.02 in bf16. A model built
in another way differs by tenths of a nat and more, and then the policy gradient is that of another policy.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms import TrainBatch
from agentrl.config.schema import Config, TrainerOptions
from agentrl.errors import DisagreementError

BOUNDS = {"fp32": (1e-3, 1e-2), "bf16": (0.03, 0.1)}
"""Precision -> mean |difference| in nats above which a run warns, and above which it stops."""

MEAN, LARGEST = "train/logprob_abs_diff_mean", "train/logprob_abs_diff_max"


@dataclass(frozen=True)
class Bounds:
    """Mean |difference| in nats above which a run warns, and above which it stops; 0 for never."""

    warn: float
    stop: float

    @classmethod
    def of(cls, config: Config | TrainerOptions, *, gpu: bool) -> Bounds:
        """What the flags say, or what is usual at this precision."""
        precision = config.dtype if config.dtype != "auto" else "bf16" if gpu else "fp32"
        given = (config.logprob_abs_diff_warn, config.logprob_abs_diff_stop)
        return cls(*(usual if bound is None else bound for bound, usual in zip(given, BOUNDS[precision], strict=True)))


def refuse(metrics: Mapping[str, float], stop: float) -> None:
    """Raise DisagreementError where the mean difference is above ``stop`` (or no number); 0 never does, nor tokens that
    no engine sampled."""
    if not stop or MEAN not in metrics or metrics[MEAN] <= stop:
        return
    raise DisagreementError(
        f"engine and trainer disagree: the log-probabilities of {metrics['train/sampled_tokens']:,.0f} sampled tokens "
        f"differ by {metrics[MEAN]:.3g} nats in the mean (at most {metrics[LARGEST]:.3g}), more than "
        f"--logprob-abs-diff-stop {stop:g}. These tokens were not trained on. Likely causes: an --sglang-* option that "
        "changes what the engine computes (quantization, rope scaling, model overrides), a field of the checkpoint's "
        "config.json that one of the two leaves out, or a trainer whose precision is not the engine's. Where the "
        "difference is expected, as with quantized engines, give a larger bound; 0 never stops."
    )


OLDEST = 4
"""Tokens of this age, in versions of the weights, and older ones are measured together."""


def by_age(batch: TrainBatch, current: np.ndarray, samples: Sequence[int]) -> dict[str, float]:
    """How trainer (``current``, float32[T]) and engine differ on the sampled tokens of these sequences, by the age of
    the weights that sampled them, in versions (column ``age``): ``train/logprob_abs_diff_mean/age_<n>``,
    ``train/rollout_kl/age_<n>`` (k3), ``train/ess/age_<n>`` and the number of tokens, ``train/sampled_tokens/age_<n>``;
    and ``train/age_mean``."""
    chosen = np.zeros(len(batch), bool)
    chosen[list(samples)] = True
    at = np.flatnonzero(chosen[batch.sequence] & (batch.loss_mask == 1))
    ages, d = batch["age"][at], current[at].astype(np.float64) - batch["rollout"][at]
    metrics = {"train/age_mean": float(ages.mean())}
    for age in np.unique(np.minimum(ages, OLDEST)).tolist():
        own = d[np.minimum(ages, OLDEST) == age]
        weights = np.exp(own)
        metrics |= {
            f"train/logprob_abs_diff_mean/age_{age}": float(np.abs(own).mean()),
            f"train/rollout_kl/age_{age}": float((np.expm1(own) - own).mean()),
            f"train/ess/age_{age}": float(weights.sum() ** 2 / (len(own) * np.square(weights).sum())),
            f"train/sampled_tokens/age_{age}": float(len(own)),
        }
    return metrics


class Trend:
    """Whether a measure rises: its median over the last :attr:`window` steps against the lowest there was."""

    window = 8
    factor = 2.0

    def __init__(self, floor: float):
        self._floor, self._values, self._lowest = floor, deque[float](maxlen=self.window), math.inf

    def rose(self, value: float) -> tuple[float, float] | None:
        """Take the next value. From what to what it rose, where it is now ``factor`` times the lowest and above the
        floor; the next rise is counted from here."""
        self._values.append(value)
        if len(self._values) < self.window:
            return None
        now, before = statistics.median(self._values), self._lowest
        self._lowest = min(before, now)
        if now <= max(self._floor, self.factor * self._lowest):
            return None
        self._lowest = now
        return before, now


class AgreementWatch:
    """Warns of a difference once when it rises above the bound, and again only after it was below; and of one that
    rises over many steps while it is still below, from a tenth of the bound on."""

    def __init__(self, warn: float):
        self._warn = warn
        self._above = False
        self._trend = Trend(warn / 10)

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to say after this step, if anything."""
        if MEAN not in metrics:  # a step without the policy
            return None
        mean, before = metrics[MEAN], self._above
        aged = metrics.get("train/age_mean", 0.0) > 0  # then it is also the difference of two versions of the weights
        self._above = bool(self._warn) and not aged and not mean <= self._warn
        rise = self._trend.rose(mean)
        if rise and self._warn and not self._above:
            return (
                f"warning: at step {step} the trainer's and the engine's log-probabilities differ by {rise[1]:.3g} "
                f"nats in the mean of {Trend.window} steps, and by {rise[0]:.3g} before: the two drift apart; see "
                '"Engine and trainer" in docs/training.md'
            )
        if before or not self._above:
            return None
        return (
            f"warning: at step {step} the trainer's and the engine's log-probabilities differ by {mean:.3g} nats in "
            f"the mean (at most {metrics[LARGEST]:.3g}), more than --logprob-abs-diff-warn {self._warn:g}; see "
            '"Engine and trainer" in docs/training.md'
        )
