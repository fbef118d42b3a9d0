"""A model on Megatron-core as one rank holds it: weights, gradients, optimizer, schedule, packed forward and backward.

It knows no algorithm: what is computed from the hidden states is the `head` of whoever runs it (`policy.py`). Every
method is collective: all ranks of the world call it with the same arguments.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.algorithms import TrainBatch
from agentrl.config.schema import TrainerOptions
from agentrl.data.writes import Writes
from agentrl.errors import GradientError
from agentrl.families.flops import Flops
from agentrl.processes.pulse import WORK
from agentrl.trainer import packing
from agentrl.trainer.batch import micro_batch
from agentrl.trainer.megatron import cpu
from agentrl.trainer.offload import Offload

cpu.install()

from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from agentrl.trainer.megatron import model as models  # noqa: E402
from agentrl.trainer.megatron.attention import PackedSequences, pack  # noqa: E402
from agentrl.trainer.megatron.export import Exporter, save_hf  # noqa: E402
from agentrl.trainer.megatron.layers import ValueHead, has_transformer_engine  # noqa: E402
from agentrl.trainer.megatron.optimizer import build_optimizer, build_scheduler, optimizer_step  # noqa: E402
from agentrl.trainer.megatron.parallel import Layout  # noqa: E402
from agentrl.trainer.megatron.state import ModelState  # noqa: E402


@dataclass
class Packed:
    """A micro-batch on the device; see :class:`~agentrl.trainer.batch.MicroBatch`."""

    tokens: Tensor
    packing: PackedSequences
    rows: Tensor
    targets: Tensor
    at: np.ndarray
    columns: dict[str, Tensor]


Head = Callable[[Packed, Tensor], tuple[Tensor, Mapping[str, Any]]]
"""From a micro-batch and the last stage's hidden states to a loss, and what :meth:`Core.run` is to return."""


class Core:
    """One model in training.

    Args:
        hf_checkpoint: directory the weights, the architecture and the tokenizer files come from.
        layout: where this rank stands in a world that it has joined.
        total_steps: optimizer steps of the run, over which the learning rate goes its way.
        values: it has a head that gives a value in place of the output layer that gives logits.

    Raises:
        ConfigError: unknown Megatron options, an unknown architecture.
        CheckpointError: the checkpoint directory is not usable.
    """

    def __init__(
        self,
        hf_checkpoint: str | Path,
        options: TrainerOptions,
        layout: Layout,
        *,
        total_steps: int,
        values: bool = False,
    ):
        self.hf_checkpoint, self.options, self.layout = Path(hf_checkpoint), options, layout
        hf_config = models.read_config(hf_checkpoint)
        models.check_overrides(options, hf_config)
        self.device = torch.device("cpu") if cpu.on_cpu() else torch.device("cuda", torch.cuda.current_device())
        self.conversion = models.make_conversion(hf_config, options, layout, logits=not values)
        self._flops = Flops.of(hf_config.to_dict())
        self.chunks = [models.build_model(self.conversion, n if layout.vpp > 1 else None) for n in range(layout.vpp)]
        """Its layers in order: in one piece, or in those that an interleaved pipeline gives this rank."""
        self.model = self.chunks[-1]
        """The chunk that ends, on the last stage, with what the head reads."""
        self.conversion.load(self.chunks, self.hf_checkpoint)
        if values and layout.last_stage:
            self.model.value_head = ValueHead.read(self.model.config, self.hf_checkpoint)
        self.ddp_chunks = [models.wrap_ddp(chunk, options) for chunk in self.chunks]
        self.ddp = self.ddp_chunks[-1]
        self.model.config.finalize_model_grads_func = finalize_model_grads
        if self.ddp.ddp_config.overlap_grad_reduce:
            # Gradients travel after the last micro-batch; Megatron otherwise expects as many of them in each step.
            self.model.config.no_sync_func = self._no_sync
        self.optimizer = build_optimizer(self.ddp_chunks, options)
        self.scheduler = build_scheduler(self.optimizer, options, total_steps)
        # Megatron's --overlap-param-gather: updated weights reach the other ranks in the next forward pass.
        self.gathers_late = self.ddp.use_forward_hook
        self._state = ModelState(self.chunks, self.conversion, self.optimizer, self.scheduler, layout)
        self._offload = Offload()
        self.steps_done = self._in_a_row = 0

    def load_hf(self, path: str | Path) -> None:
        """Set the weights from a Hugging Face checkpoint directory of the same architecture.
        Raises ConfigError: its ``config.json`` asks for another model, be it with weights of the same shapes."""
        models.check_same(models.read_config(path), self.conversion.hf_config, Path(path))
        self.conversion.load(self.chunks, Path(path))
        self.optimizer.reload_model_params()

    # -- forward and backward ---------------------------------------------------------------------

    def schedule(self, batch: TrainBatch, num_steps: int = 1) -> list[packing.Step]:
        """Which sequences run together; those of an episode in one optimizer step. Ranks have equal work, in FLOPs."""
        fixed = None if self.options.use_dynamic_batch_size else self.options.micro_batch_size
        lengths = batch.lengths.tolist()
        logits = batch.sampled_of.tolist() if self.conversion.logits else [0] * len(lengths)
        return packing.schedule(
            lengths,
            costs=[self._flops.sequence(n, sampled) for n, sampled in zip(lengths, logits, strict=True)],
            dp=self.layout.dp,
            max_tokens=None if fixed else self.options.max_tokens_per_gpu,
            micro_batch_size=fixed,
            # Stages of an interleaved pipeline take turns in rounds of as many micro-batches as there are of them.
            multiple_of=self.layout.pp if self.layout.vpp > 1 else 1,
            num_steps=num_steps,
            keys=[batch.episode_ids[trajectory] for trajectory in batch.trajectory_of],
        )

    def run(self, batch: TrainBatch, step: packing.Step, head: Head, *, forward_only: bool = False) -> list[dict]:
        """What ``head`` returned beside the loss, for each micro-batch of this rank; gradients are in the buffers.

        Megatron divides a micro-batch's loss by their number and averages gradients over data-parallel ranks:
        weights of tokens must carry :meth:`scale`.
        """

        def forward(iterator: Iterator[Packed], model):
            packed = next(iterator)
            hidden = model(
                input_ids=packed.tokens,
                position_ids=packed.packing.positions[None],
                attention_mask=None,
                packed_seq_params=packed.packing,
            )
            return hidden, functools.partial(head, packed)

        mine = step.ranks[self.layout.dp_rank]
        if not forward_only:
            for chunk in self.ddp_chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        # Every chunk of layers takes every micro-batch; it is packed once, and dropped when the last has taken it.
        packed = itertools.tee((self.pack(batch, samples) for samples in mine), len(self.chunks))
        self._train(not forward_only)  # no dropout in a forward pass, and nothing is kept for a backward one
        try:
            with torch.set_grad_enabled(not forward_only):
                return get_forward_backward_func()(
                    forward_step_func=forward,
                    data_iterator=list(packed),
                    model=self.ddp_chunks,
                    num_microbatches=len(mine),
                    seq_length=self.options.max_tokens_per_gpu,
                    micro_batch_size=1,
                    forward_only=forward_only,
                )
        finally:
            self._train(True)

    def infer(self, batch: TrainBatch, of: Callable[[Packed, Tensor], Tensor], step: packing.Step) -> np.ndarray:
        """float32[T]: what ``of`` gives for the sampled tokens of the sequences of ``step``, 0 for others. The same on
        all ranks."""

        def head(packed: Packed, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
            values = of(packed, hidden)
            return values.new_zeros(()), {"at": packed.at, "values": values}

        return self.whole(self.run(batch, step, head, forward_only=True), "values", batch.num_tokens)

    def _train(self, mode: bool) -> None:
        for chunk in self.chunks:
            chunk.train(mode)

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for chunk in self.ddp_chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def scale(self, step: packing.Step) -> int:
        """What a weight of a token must be multiplied with, see :meth:`run`."""
        return step.num_micro_batches * self.layout.dp

    def pack(self, batch: TrainBatch, samples: Sequence[int]) -> Packed:
        """These sequences as one micro-batch on the device. The one before has come as far as this."""
        WORK.mark()
        micro = micro_batch(batch, samples, multiple_of=self.layout.tp if self.options.sequence_parallel else 1)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        return Packed(
            tokens=put(micro.tokens)[None],
            packing=pack(tuple(micro.lengths.tolist()), put(micro.positions), thd=has_transformer_engine()),
            rows=put(micro.rows),
            targets=put(micro.targets),
            at=micro.at,
            columns={name: put(values) for name, values in micro.columns.items()},
        )

    def update(self) -> dict[str, float]:
        """Update the weights from the gradients in the buffers, see `optimizer_step`; its metrics.
        Raises GradientError: too many in a row had gradients that are not finite (``--max-skipped-steps``)."""
        updated, norm, rate = optimizer_step(self.optimizer, self.scheduler, self.options.clip_grad)
        self.steps_done += 1
        empty = norm == 0
        skipped = not updated and not empty
        if not empty:
            self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row > self.options.max_skipped_steps:
            raise GradientError(
                f"the gradients of {self._in_a_row} optimizer steps in a row are not finite (norm {norm}), more than "
                f"--max-skipped-steps {self.options.max_skipped_steps}: nothing would be learned any more. Go "
                "on from a checkpoint of before with a smaller --lr, or look at rewards and advantages of this rollout"
            )
        left_out = {"steps_skipped": float(skipped), "steps_empty": float(empty)}
        return {"grad_norm": norm, "lr": rate, **left_out}

    def settle(self) -> None:
        """After the last update: export and log-probabilities would otherwise see some weights of before."""
        if self.gathers_late:
            for chunk in self.ddp_chunks:
                chunk.start_param_sync(force_sync=True)

    # -- over the world ---------------------------------------------------------------------------

    def whole(self, results: Sequence[Mapping[str, Any]], name: str, size: int) -> np.ndarray:
        """float32[size]: values under ``name`` at the places under ``at``, of all ranks. The same on all ranks."""
        values = torch.zeros(size, dtype=torch.float32, device=self.device)
        if self.layout.reports:
            for result in results:
                values[torch.from_numpy(result["at"]).to(self.device)] = result[name]
        dist.all_reduce(values)
        return values.cpu().numpy()

    def reduce(self, results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[dict[str, float], float]:
        """Sums under ``sums`` and the largest of ``largest``, of all ranks. The same on all ranks."""
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        largest = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.layout.reports:
            for result in results:
                sums += torch.stack([result["sums"][name] for name in names])
            largest = torch.stack([r["largest"] for r in results]).max()
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(names, sums.tolist(), strict=True)), float(largest)

    # -- weights and state ------------------------------------------------------------------------

    @functools.cached_property
    def _exporter(self) -> Exporter:
        return Exporter(self.chunks, self.conversion)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """``(hf_name, full tensor)`` of every weight, on every rank in lockstep. See Exporter."""
        return iter(self._exporter)

    def save_hf(self, target: str | Path, writes: Writes | None = None) -> None:
        """Write the weights as a Hugging Face directory with tokenizer and chat template."""
        more = self.conversion.kept_aside(self.hf_checkpoint) if self.layout.rank == 0 else None
        save_hf(self.export(), more, self.hf_checkpoint, Path(target), writes or Writes())
        dist.barrier()

    def save(self, folder: Path, writes: Writes | None = None) -> None:
        """Write weights, optimizer (unless ``--no-save-optim``), scheduler and random state into a folder (see
        `state.py`)."""
        counters = {"steps_done": self.steps_done}
        self._state.save(folder, counters, writes or Writes(), moments=self.options.save_optim)

    def load(self, folder: Path) -> None:
        """Go on from a folder that :meth:`save` wrote, at the same or another parallel layout.
        Raises CheckpointError: files are missing or of another model."""
        self.steps_done = self._state.load(folder, moments=self.options.load_optim)["steps_done"]

    # -- memory -----------------------------------------------------------------------------------

    def release_memory(self) -> int:
        """Move weights and optimizer to host memory and drop the gradients, until :meth:`resume_memory`; bytes."""
        self.optimizer.zero_grad()  # what hangs on parameters: the next pass would begin so
        buffers = [b for chunk in self.ddp_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return self._offload.release(self.device, kept=self._lasting(), dropped=[b.grad_data for b in buffers])

    def resume_memory(self) -> None:
        """Have all of it on the device again."""
        self._offload.resume()

    def _lasting(self) -> Iterator[Tensor]:
        """Weights, and what the optimizer holds: its own float32 weights where it has some, and moments."""
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))
