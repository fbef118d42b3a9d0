"""Whether engine and trainer compute the same policy.

The trainer computes the log-probability of each sampled token anew. With equal weights and equal mathematics it
differs from the engine's by rounding only: about 1e-6 nats in the mean in fp32, 0.002 to 0.02 in bf16. A model built
in another way differs by tenths of a nat and more, and then the policy gradient is that of another policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Raise DisagreementError where the mean difference is above ``stop`` (or no number); 0 never does."""
    if not stop or metrics[MEAN] <= stop:
        return
    raise DisagreementError(
        f"engine and trainer disagree: the log-probabilities of {metrics['train/sampled_tokens']:,.0f} sampled tokens "
        f"differ by {metrics[MEAN]:.3g} nats in the mean (at most {metrics[LARGEST]:.3g}), more than "
        f"--logprob-abs-diff-stop {stop:g}. These tokens were not trained on. Likely causes: an --sglang-* option that "
        "changes what the engine computes (quantization, rope scaling, model overrides), a field of the checkpoint's "
        "config.json that one of the two leaves out, or a trainer whose precision is not the engine's. Where the "
        "difference is expected, as with quantized engines, give a larger bound; 0 never stops."
    )


class AgreementWatch:
    """Warns of a difference once when it rises above the bound, and again only after it was below."""

    def __init__(self, warn: float):
        self._warn = warn
        self._above = False

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to say after this step, if anything."""
        mean, before = metrics.get(MEAN, 0.0), self._above
        self._above = bool(self._warn) and not mean <= self._warn
        if before or not self._above:
            return None
        return (
            f"warning: at step {step} the trainer's and the engine's log-probabilities differ by {mean:.3g} nats in "
            f"the mean (at most {metrics[LARGEST]:.3g}), more than --logprob-abs-diff-warn {self._warn:g}; see "
            '"Engine and trainer" in docs/training.md'
        )
