"""One rank of the trainer: batches in, metrics and weights out. Free of Ray.

Every public method is collective: all ranks of the world call it with the same arguments.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainer import agreement, packing
from agentrl.trainer.batch import MicroBatch, TrainBatch
from agentrl.trainer.losses import MISMATCH, SUMS, LossOptions, metrics_from_sums, token_loss
from agentrl.trainer.megatron import cpu

cpu.install()

from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from agentrl.trainer.megatron import model as models  # noqa: E402
from agentrl.trainer.megatron import parallel  # noqa: E402
from agentrl.trainer.megatron.attention import PackedSequences, pack  # noqa: E402
from agentrl.trainer.megatron.export import Exporter  # noqa: E402
from agentrl.trainer.megatron.hf_save import save_hf  # noqa: E402
from agentrl.trainer.megatron.layers import has_transformer_engine  # noqa: E402
from agentrl.trainer.megatron.log_probs import log_probs  # noqa: E402
from agentrl.trainer.megatron.optimizer import build_optimizer, build_scheduler, optimizer_step  # noqa: E402
from agentrl.trainer.megatron.options import TrainerOptions  # noqa: E402
from agentrl.trainer.megatron.state import TrainerState  # noqa: E402
from agentrl.trainer.reference import WeightCopies  # noqa: E402

__all__ = ["MegatronTrainer", "TrainerOptions"]


@dataclass
class _Packed:
    """A micro-batch on the device. ``old`` is None where the model's own log-probabilities serve."""

    tokens: Tensor
    packing: PackedSequences
    rows: Tensor
    targets: Tensor
    columns: np.ndarray
    advantages: Tensor
    rollout: Tensor
    old: Tensor | None
    ref: Tensor | None


class MegatronTrainer:
    """A policy in training on Megatron-core, as one of ``world_size`` ranks.

    Args:
        rank, world_size: of this process.
        init_method: where the ranks meet, as torch writes it; see :func:`parallel.initialize`.
        hf_checkpoint: directory the weights, the architecture and the tokenizer files come from.
        options: everything else.
        listener: rank 0 only: a socket that already listens at the port of ``init_method``.

    Raises:
        ConfigError: sizes that do not fit, unknown Megatron options, an unknown architecture.
        CheckpointError: the checkpoint directory is not usable.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        init_method: str,
        hf_checkpoint: str | Path,
        options: TrainerOptions,
        *,
        listener: socket.socket | None = None,
    ):
        self.options = options
        self.hf_checkpoint = Path(hf_checkpoint)
        hf_config = models.read_config(hf_checkpoint)
        models.check_overrides(options, hf_config)
        self.layout = parallel.initialize(rank, world_size, init_method, options, listener)
        try:
            self._build(hf_config)
        except BaseException:
            parallel.shutdown()
            raise

    def _build(self, hf_config: Any) -> None:
        options, hf_checkpoint = self.options, self.hf_checkpoint
        self.device = torch.device("cpu") if cpu.on_cpu() else torch.device("cuda", torch.cuda.current_device())
        self.bridge = models.make_bridge(hf_config, options, self.layout)
        self.model = models.build_model(self.bridge, self.layout)
        self.ddp = models.wrap_ddp(self.model, options)
        self.model.config.finalize_model_grads_func = finalize_model_grads
        if self.ddp.ddp_config.overlap_grad_reduce:
            # Gradients travel after the last micro-batch; Megatron otherwise expects as many of them in each step.
            self.model.config.no_sync_func = self.ddp.no_sync
        self._copies = WeightCopies(self.model)
        self.load_hf(options.ref_load or hf_checkpoint)
        if options.kl_coef:
            self._copies.keep("ref")
        if options.ref_load:
            self.load_hf(hf_checkpoint)
        self.optimizer = build_optimizer(self.ddp, options)
        self.scheduler = build_scheduler(self.optimizer, options)
        # Megatron's --overlap-param-gather: updated weights reach the other ranks in the next forward pass.
        self.gathers_late = self.ddp.use_forward_hook
        self.loss_options = LossOptions(
            eps_clip=options.eps_clip,
            eps_clip_high=options.eps_clip_high,
            kl_loss_coef=options.kl_coef,
            kl_loss_type=options.kl_loss_type,
            entropy_coef=options.entropy_coef,
        )
        self.shard = models.vocab_shard(self.model, self.bridge, self.layout) if self.layout.last_stage else None
        self._run = get_forward_backward_func()
        self._state = TrainerState(self.model, self.bridge, self.optimizer, self.scheduler, self.layout)
        self._exporter: Exporter | None = None
        self.steps_done = 0
        self.steps_skipped = 0

    def load_hf(self, path: str | Path) -> None:
        """Set the weights from a Hugging Face checkpoint directory of the same architecture."""
        models.read_config(path)
        models.load_weights(self.model, self.bridge, path)
        if hasattr(self, "optimizer"):
            self.optimizer.reload_model_params()

    # -- training ---------------------------------------------------------------------------------

    def train(self, batch: TrainBatch, *, num_steps: int = 1) -> dict[str, float]:
        """Train on a batch in ``num_steps`` optimizer steps and report.

        Log-probabilities of the reference are computed first where the loss needs them, and
        the old ones without ``use_rollout_logprobs``.

        Args:
            batch: all samples of the rollout; every rank gets the whole of it and takes its part.
            num_steps: optimizer steps; episodes are dealt to them in order, never split. Fewer are made
                where fewer episodes are left of the rollout.

        Returns:
            Metrics, means over the steps (counts are sums, ``lr`` is the last). The same on all ranks.

        Raises:
            DisagreementError: the engine's log-probabilities are not this model's
                (``logprob_abs_diff_stop``). Nothing was updated.
        """
        started = time.perf_counter()
        num_steps = min(num_steps, max(batch.num_episodes, 1))
        if self.loss_options.kl_loss_coef and batch.ref_logprobs is None:
            batch = batch.with_logprobs(ref_logprobs=self.log_probs(batch, "ref"))
        recompute = not self.options.use_rollout_logprobs
        current_is_old = recompute and num_steps == 1
        if recompute and not current_is_old:
            batch = batch.with_logprobs(old_logprobs=self.log_probs(batch, "actor"))
        prepared = time.perf_counter()
        steps = self._schedule(batch, num_steps, batch.episode_ids)
        # Engine against trainer can be compared only before the first update moves the weights.
        stops = [self.options.logprob_abs_diff_stop, *[0.0] * (len(steps) - 1)]
        reports = [self._train_step(batch, s, current_is_old, stop) for s, stop in zip(steps, stops, strict=True)]
        if self.gathers_late:
            # Otherwise export, checkpoint and log-probabilities would see parts of the weights before the last update.
            self.ddp.start_param_sync(force_sync=True)
        seconds = time.perf_counter() - prepared
        metrics = {name: float(np.mean([r[name] for r in reports])) for name in reports[0]}
        metrics |= {name: reports[0][name] for name in MISMATCH}
        totals = ("train/sampled_tokens", "train/steps_skipped", "train/micro_batches")
        metrics |= {name: sum(r[name] for r in reports) for name in totals}
        return metrics | {
            "train/lr": reports[-1]["train/lr"],
            "train/steps": float(len(steps)),
            "train/tokens": float(batch.num_tokens),
            "train/samples": float(len(batch)),
            "train/trajectories": float(batch.num_trajectories),
            "time/log_probs": prepared - started,
            "time/train_steps": seconds,
            "train/tokens_per_s": batch.num_tokens / seconds,
        }

    def _train_step(self, batch: TrainBatch, step: packing.Step, current_is_old: bool, stop: float) -> dict[str, float]:
        tokens = batch.sampled_in(step.samples)
        if not tokens:
            raise ConfigError(f"an optimizer step of {len(step.samples)} samples has no sampled token")
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron divides a micro-batch's loss by their number and averages gradients over
        # data-parallel ranks; this factor cancels both and leaves the mean over the step's tokens.
        scale = step.num_micro_batches * self.layout.dp / tokens
        loss = functools.partial(self._loss, scale)
        results = self._forward_backward(batch, step, loss, forward_only=False, old=not current_is_old)
        report = self._reduce(results)
        agreement.refuse(report, stop)
        updated, norm, rate = optimizer_step(self.optimizer, self.scheduler, self.options.clip_grad)
        self.steps_done += 1
        self.steps_skipped += not updated
        return report | {
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/steps_skipped": float(not updated),
            "train/micro_batches": float(step.num_micro_batches),
        }

    def _loss(self, scale: float, packed: _Packed, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values, entropy = self._log_probs_of(packed, hidden, entropy=bool(self.loss_options.entropy_coef))
        total, sums, largest = token_loss(
            values,
            entropy,
            advantages=packed.advantages,
            old_logprobs=values.detach() if packed.old is None else packed.old,
            rollout_logprobs=packed.rollout,
            ref_logprobs=packed.ref,
            options=self.loss_options,
        )
        return total * scale, {"sums": sums, "largest": largest}

    def _log_probs_of(self, packed: _Packed, hidden: Tensor, *, entropy: bool = False):
        weight = self.model.output_weight()
        if self.gathers_late:  # Megatron waits for weights in the forward pass of their module, and this one has none
            self.ddp.param_to_bucket_group[weight].finish_param_sync()
        return log_probs(
            self.model.rows_for_logits(hidden, packed.rows),
            weight,
            packed.targets,
            self.shard,
            temperature=self.options.temperature,
            entropy=entropy,
        )

    def _reduce(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        largest = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.layout.reports:
            sums += torch.stack([r["sums"] for r in results]).sum(0)
            largest = torch.stack([r["largest"] for r in results]).max()
        if self.layout.world_size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return metrics_from_sums(dict(zip(SUMS, sums.tolist(), strict=True)), float(largest))

    # -- log-probabilities ------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, which: Literal["actor", "ref"] = "actor") -> np.ndarray:
        """Log-probabilities of the sampled tokens under the live or the reference weights.

        Returns:
            float32[batch.num_tokens], 0 where a token was not sampled. The same on all ranks.
        """
        if which == "ref":
            if "ref" not in self._copies:
                raise ConfigError("no reference weights are kept; set use_kl_loss and kl_loss_coef")
            with self._copies.use("ref"):
                return self.log_probs(batch, "actor")
        (step,) = self._schedule(batch, 1, None)
        self.model.eval()  # no dropout, and nothing is kept for a backward pass

        def collect(packed: _Packed, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
            values, _ = self._log_probs_of(packed, hidden)
            return hidden.new_zeros((), dtype=torch.float32), {"at": packed.columns, "values": values}

        try:
            results = self._forward_backward(batch, step, collect, forward_only=True, old=True)
        finally:
            self.model.train()
        whole = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self.device)
        if self.layout.reports:
            for result in results:
                whole[torch.from_numpy(result["at"]).to(self.device)] = result["values"]
        if self.layout.world_size > 1:
            dist.all_reduce(whole)
        return whole.cpu().numpy()

    # -- forward and backward ---------------------------------------------------------------------

    def _schedule(self, batch: TrainBatch, num_steps: int, keys) -> list[packing.Step]:
        fixed = self.options.micro_batch_size
        return packing.schedule(
            batch.lengths.tolist(),
            dp=self.layout.dp,
            max_tokens=None if fixed else self.options.max_tokens_per_gpu,
            micro_batch_size=fixed,
            num_steps=num_steps,
            keys=keys,
        )

    def _forward_backward(self, batch, step, loss, *, forward_only: bool, old: bool) -> list[dict]:
        def forward(iterator: Iterator[_Packed], model):
            packed = next(iterator)
            hidden = model(
                input_ids=packed.tokens,
                position_ids=packed.packing.positions[None],
                attention_mask=None,
                packed_seq_params=packed.packing,
            )
            return hidden, functools.partial(loss, packed)

        mine = step.ranks[self.layout.dp_rank]
        multiple = self.layout.tp if self.options.sequence_parallel else 1
        micro_batches = (self._to_device(batch.micro_batch(samples, multiple_of=multiple), old=old) for samples in mine)
        return self._run(
            forward_step_func=forward,
            data_iterator=micro_batches,
            model=self.ddp,
            num_microbatches=len(mine),
            seq_length=self.options.max_tokens_per_gpu,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _to_device(self, micro: MicroBatch, *, old: bool) -> _Packed:
        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        packing_ = pack(tuple(micro.lengths.tolist()), put(micro.positions), thd=has_transformer_engine())
        return _Packed(
            tokens=put(micro.tokens)[None],
            packing=packing_,
            rows=put(micro.rows),
            targets=put(micro.targets),
            columns=micro.columns,
            advantages=put(micro.advantages),
            rollout=put(micro.rollout_logprobs),
            old=put(micro.old_logprobs) if old else None,
            ref=None if micro.ref_logprobs is None else put(micro.ref_logprobs),
        )

    # -- weights out ------------------------------------------------------------------------------

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """``(hf_name, full tensor)`` of every weight, on every rank in lockstep. See Exporter."""
        if self._exporter is None:
            self._exporter = Exporter(self.model, self.bridge)
        return iter(self._exporter)

    def save_hf(self, target: str | Path) -> None:
        """Write the weights as a Hugging Face directory with tokenizer and chat template."""
        save_hf(self.export(), self.hf_checkpoint, Path(target), write=self.layout.rank == 0)
        if self.layout.world_size > 1:
            dist.barrier()

    # -- state ------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer, scheduler and random state into a folder (see `state.py`)."""
        self._state.save(Path(folder), {"steps_done": self.steps_done, "steps_skipped": self.steps_skipped})

    def load(self, folder: str | Path) -> None:
        """Go on from a folder that :meth:`save` wrote, at the same or another parallel layout.

        Raises:
            CheckpointError: files are missing or of another model.
        """
        counters = self._state.load(Path(folder))
        self.steps_done, self.steps_skipped = counters["steps_done"], counters["steps_skipped"]

    def close(self) -> None:
        """Leave the process groups."""
        parallel.shutdown()
