"""The policy on a :class:`Core`: log-probabilities under its weights and the reference's, and updates on a loss."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms import Algorithm, TrainBatch
from agentrl.data.writes import Writes
from agentrl.errors import ConfigError
from agentrl.trainer import agreement
from agentrl.trainer.batch import token_columns
from agentrl.trainer.losses import MISMATCH, Loss, Tokens, metrics_of
from agentrl.trainer.megatron.core import Core, Packed
from agentrl.trainer.megatron.log_probs import log_probs
from agentrl.trainer.megatron.model import vocab_shard
from agentrl.trainer.packing import Step
from agentrl.trainer.reference import Reference


class Policy:
    """The model that is trained, by the credit and the terms of the loss of an algorithm."""

    columns = ("old", "ref")
    """What :meth:`infer` can give."""

    def __init__(self, core: Core, algorithm: Algorithm):
        options = core.options
        self.core, self.algorithm, self.loss = core, algorithm, Loss(algorithm, options)
        self._shard = vocab_shard(core.model, core.conversion) if core.layout.last_stage else None
        self._stop = agreement.Bounds.of(options, gpu=core.device.type == "cuda").stop
        self.reference = Reference(torch.nn.ModuleList(core.chunks))
        if "ref" in algorithm.infers(1):
            if options.ref_load and Path(options.ref_load) != core.hf_checkpoint:
                self.load_reference(Path(options.ref_load))
            else:
                self.reference.keep()

    def save_reference(self, folder: Path, writes: Writes | None = None) -> None:
        """Write the reference as a Hugging Face directory: it loads at any layout."""
        with self.reference.use():
            self.core.save_hf(folder, writes)

    def load_reference(self, folder: Path) -> None:
        """Take the reference from a Hugging Face directory. The live weights are those of the checkpoint then."""
        self.core.load_hf(folder)
        self.reference.keep()
        self.core.load_hf(self.core.hf_checkpoint)

    def infer(self, batch: TrainBatch, name: str) -> np.ndarray:
        """Log-probabilities of the sampled tokens under the live (``old``) or the reference (``ref``) weights:
        float32[T], 0 where a token was not sampled. The same on all ranks.
        Raises ConfigError: no reference weights are kept."""
        (step,) = self.core.schedule(batch)
        if name == "old":
            return self._log_probs(batch, step)
        if not self.reference:
            raise ConfigError("no reference weights are kept; give --use-kl-loss or --kl-coef, or name 'ref' in needs")
        with self.reference.use():
            return self._log_probs(batch, step)

    def update(
        self, batch: TrainBatch, *, num_steps: int = 1, keep: bool = False
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Train on a batch that has ``advantage`` in ``num_steps`` optimizer steps and report.

        Args:
            batch: all sequences of the rollout; every rank gets the whole of it and takes its part. Without a column
                ``old`` the model as it stands is the old policy, which one step allows.
            num_steps: optimizer steps; episodes are dealt to them in order, never split. Fewer are made
                where fewer episodes are left of the rollout.
            keep: also return ``current`` and ``ratio``, each token's in its own step, float32[T].

        Returns:
            Metrics, means over the steps (counts are sums, ``lr`` is the last), and columns. The same on all ranks.

        Raises:
            DisagreementError: the engine's log-probabilities are not this model's
                (``--logprob-abs-diff-stop``). Nothing was updated.
        """
        began = time.perf_counter()
        core, num_steps = self.core, batch.steps(num_steps)
        if num_steps > 1 and "rollout" in batch.columns and "old" not in batch.columns:
            raise ConfigError(f"{num_steps} optimizer steps need the column 'old'; infer it before the first")
        kept = {name: np.zeros(batch.num_tokens, np.float32) for name in (("current", "ratio") if keep else ())}
        reports: list[dict[str, float]] = []
        aged: dict[str, float] = {}
        for step in core.schedule(batch, num_steps):
            scale = core.scale(step)
            weight = self.algorithm.aggregate(batch, step.samples) * scale
            columns = {"weight": weight.astype(np.float32)}
            if self.algorithm.follows:
                # Before the first update the old policy is the present one, where the trainer inferred it.
                inferred = not reports and not core.options.use_rollout_logprobs
                current = batch["old"] if inferred else self._log_probs(batch, step)
                columns |= self.algorithm.in_step(batch.with_columns(current=current))
            whole = batch.with_columns(**columns)
            results = core.run(whole, step, self._head(keep))
            report = metrics_of(*core.reduce(results, self.loss.names(token_columns(whole))), scale)
            # Engine and trainer must agree only on tokens of these very weights: before the first update moves them.
            moved = bool(reports) or ("age" in batch.columns and batch["age"].any())
            agreement.refuse(report, 0.0 if moved else self._stop)
            if not reports and "age" in batch.columns:
                current = core.whole(results, "current", batch.num_tokens)
                aged = agreement.by_age(batch, current, step.samples)
            for name, values in kept.items():
                values += core.whole(results, name, batch.num_tokens)
            report |= {f"train/{name}": value for name, value in core.update().items()}
            reports.append(report | {"train/micro_batches": float(step.num_micro_batches)})
        core.settle()
        seconds = time.perf_counter() - began
        metrics = {name: float(np.mean([r[name] for r in reports])) for name in reports[0]}
        metrics |= {name: reports[0][name] for name in MISMATCH if name in metrics}
        totals = ("train/sampled_tokens", "train/steps_skipped", "train/steps_empty", "train/micro_batches")
        metrics |= {name: sum(r[name] for r in reports) for name in totals}
        return metrics | aged | {
            "train/lr": reports[-1]["train/lr"],
            "train/steps": float(num_steps),
            "train/tokens": float(batch.num_tokens),
            "train/samples": float(len(batch)),
            "train/trajectories": float(batch.num_trajectories),
            "time/train_steps": seconds,
            "train/tokens_per_s": batch.num_tokens / seconds,
        }, kept

    def _head(self, keep: bool):
        def head(packed: Packed, hidden: Tensor):
            values, entropy = self._of(packed, hidden, entropy=self.loss.wants_entropy)
            tokens = Tokens(values, entropy, packed.columns)
            total, sums, largest = self.loss(tokens)
            result = {"sums": sums, "largest": largest, "at": packed.at, "current": values.detach()}
            if keep:
                result["ratio"] = tokens.log_ratio.detach().exp()
            return total, result

        return head

    def _log_probs(self, batch: TrainBatch, step: Step) -> np.ndarray:
        return self.core.infer(batch, lambda packed, hidden: self._of(packed, hidden)[0], step)

    def _of(self, packed: Packed, hidden: Tensor, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        core = self.core
        assert self._shard is not None  # only the last stage gets here
        weight = core.model.output_weight()
        if core.gathers_late:  # Megatron waits for weights in the forward pass of their module, and this one has none
            core.ddp.param_to_bucket_group[weight].finish_param_sync()
        return log_probs(
            core.model.rows_for_logits(hidden, packed.rows),
            weight,
            packed.targets,
            self._shard,
            temperature=core.options.rollout_temperature,
            entropy=entropy,
        )
