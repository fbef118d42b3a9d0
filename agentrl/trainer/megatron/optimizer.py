"""Megatron's optimizer and learning-rate scheduler, and one step that refuses bad gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from agentrl.config.schema import OptimizerOptions, TrainerOptions
from agentrl.trainer.megatron.model import megatron_overrides, resolve_dtype


def build_optimizer(chunks: Sequence[DistributedDataParallel], options: TrainerOptions) -> MegatronOptimizer:
    """Adam with decoupled weight decay (none on norms and biases), float32 master weights for bf16."""
    dtype = resolve_dtype(options)
    settings = {
        "optimizer": "adam",
        "lr": options.lr,
        "min_lr": options.min_lr,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.adam_beta1,
        "adam_beta2": options.adam_beta2,
        "clip_grad": options.clip_grad,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": options.use_distributed_optimizer,
        **megatron_overrides(options, OptimizerConfig),
    }
    return get_megatron_optimizer(OptimizerConfig(**settings), list(chunks), use_gloo_process_groups=False)


def build_scheduler(
    optimizer: MegatronOptimizer, options: OptimizerOptions, total_steps: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then ``options.lr_decay_style``; weight decay from its start to its end. Counts the optimizer
    steps that were taken.

    With a warm-up of W steps and N = ``total_steps`` in all, step k = 1, 2, ... has lr * k / W up to k = W; from there
    the style takes lr at k = max(W, 1) to min_lr at k = N + 1. So one step has the peak, and none has min_lr. WSD stays
    at the peak up to k = N + 1 - ``lr_wsd_decay_steps``. ``inverse-square-root`` has min_lr as its least and no end.
    Weight decay is ``start_weight_decay`` at k = 1 and ``weight_decay`` at k = N.
    """
    # Before step k the scheduler has counted k - 1, so its warm-up starts at the first step's rate.
    warmup = max(options.lr_warmup_steps - 1, 0)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr / (warmup + 1),
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay if options.start_weight_decay is None else options.start_weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=max(total_steps - 1, 1),
        wd_incr_style="constant" if options.start_weight_decay is None else options.weight_decay_incr_style,
        wsd_decay_steps=options.lr_wsd_decay_steps,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


def optimizer_step(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, clip: float
) -> tuple[bool, float, float]:
    """Update the weights from the gradients in the buffers.

    Where the gradient norm is not finite, or exactly 0, nothing changes: no weight, no moment, no step count. Of a
    batch that teaches nothing Adam's momentum would go on in the direction of earlier ones, and weights would decay.

    Args:
        clip: largest gradient norm; 0 for no limit.

    Returns:
        Whether the weights were updated, the gradient norm before clipping, the learning rate.
    """
    rate = float(optimizer.param_groups[0]["lr"])
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if overflow or not math.isfinite(norm) or norm == 0:
        optimizer.zero_grad()
        return False, norm, rate
    if clip > 0:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            parameters = part.get_parameters()
            if parameters:
                clip_grads.clip_grad_by_total_norm_fp32(parameters, clip, norm)
    updated = bool(optimizer.step_with_ready_grads())
    scheduler.step(1)
    return updated, norm, rate
