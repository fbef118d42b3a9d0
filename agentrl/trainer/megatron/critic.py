"""The critic on a :class:`Core`: the value of the state before each sampled token, and updates towards returns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms import Algorithm, TrainBatch
from agentrl.config.schema import TrainerOptions
from agentrl.trainer.losses import value_loss
from agentrl.trainer.megatron.core import Core, Packed
from agentrl.trainer.megatron.parallel import Layout

SUMS = ("weight", "value_loss", "value_clip_fraction")


class Critic:
    """The model that learns what a state is worth, in the same ranks and layout as the policy."""

    columns = ("values",)
    """What :meth:`infer` can give."""

    def __init__(self, core: Core, algorithm: Algorithm):
        self.core, self.algorithm = core, algorithm

    @classmethod
    def of(
        cls, hf_checkpoint: str | Path, options: TrainerOptions, layout: Layout, algorithm: Algorithm
    ) -> Critic | None:
        """The critic of a run; None where its algorithm reads no values."""
        if "values" not in algorithm.needs:
            return None
        own = options.replace(lr=options.critic_lr or options.lr, lr_warmup_steps=options.critic_lr_warmup_steps)
        steps = options.total_steps
        return cls(Core(options.critic_load or hf_checkpoint, own, layout, total_steps=steps, values=True), algorithm)

    def infer(self, batch: TrainBatch, name: str) -> np.ndarray:
        """float32[T]: values of the states before the sampled tokens, see :meth:`Core.infer`."""
        (step,) = self.core.schedule(batch)
        return self.core.infer(batch, self._values, step)

    def update(self, batch: TrainBatch, *, num_steps: int = 1) -> dict[str, float]:
        """Train on a batch that has ``values`` and ``returns``, in the optimizer steps of :meth:`Policy.update`. Gives
        metrics, means over the steps (skipped ones are a sum, the rate is the last), the same on all ranks."""
        began = time.perf_counter()
        core, reports = self.core, []
        for step in core.schedule(batch, batch.steps(num_steps)):
            weight = self.algorithm.aggregate(batch, step.samples) * core.scale(step)
            results = core.run(batch.with_columns(weight=weight.astype(np.float32)), step, self._loss)
            sums, _ = core.reduce(results, SUMS)
            total = sums["weight"] or 1.0  # 0 where all episodes of the step are masked
            means = {name: sums[name] / total for name in ("value_loss", "value_clip_fraction")}
            reports.append({f"critic/{name}": value for name, value in (means | core.update()).items()})
        core.settle()
        return {name: float(np.mean([report[name] for report in reports])) for name in reports[0]} | {
            "critic/lr": reports[-1]["critic/lr"],
            **{name: sum(r[name] for r in reports) for name in ("critic/steps_skipped", "critic/steps_empty")},
            "critic/explained_variance": explained_variance(batch),
            "time/critic_steps": time.perf_counter() - began,
        }

    def _values(self, packed: Packed, hidden: Tensor) -> Tensor:
        return self.core.model.value_head(hidden, packed.rows)

    def _loss(self, packed: Packed, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
        columns = packed.columns
        weight, clip = columns["weight"], self.core.options.value_clip
        term = value_loss(self._values(packed, hidden), columns["values"], columns["returns"], clip)
        with torch.no_grad():
            means = {"value_loss": term.values, **term.metrics}
            sums = {name: (weight.double() * values.double()).sum() for name, values in means.items()}
            sums["weight"] = weight.double().sum()
        return (weight * term.values).sum(), {"sums": sums, "largest": weight.new_zeros(()), "at": packed.at}


def explained_variance(batch: TrainBatch) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the sampled tokens, before the update: 1 where the critic knew
    all that would come, 0 where it knew no more than the mean; 0 too where all returns are alike."""
    sampled = batch.loss_mask == 1
    values, returns = batch["values"][sampled].astype(np.float64), batch["returns"][sampled].astype(np.float64)
    spread = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / spread if spread > 0 else 0.0
