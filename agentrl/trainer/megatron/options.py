"""Options of one trainer, and Megatron's own options by their own names. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ConfigError

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True)
class TrainerOptions:
    """What a trainer needs to know. Names are those of the flags; sizes are counts, times seconds."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    recompute_activations: bool = False

    dtype: str = "auto"
    """``fp32``, ``bf16``, or ``auto``: float32 on the CPU, bfloat16 with float32 gradients on a GPU."""
    seed: int = 1234
    deterministic: bool = False
    """Only algorithms that give the same bits each time; torch raises where it has none."""
    threads: int = 1
    """Threads of torch in this process, on the CPU."""
    timeout_s: float = 1800.0
    """Deadline of every collective."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly; the first step has lr / lr_warmup_steps."""
    lr_decay_style: str = "constant"
    lr_decay_steps: int | None = None
    """Optimizer steps of the run; the one after the last would have ``min_lr``. Needed unless the style is constant."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest gradient norm; 0 leaves gradients as they are."""

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    temperature: float = 1.0
    """Sampling temperature: log-probabilities are of softmax(logits / temperature)."""
    use_rollout_logprobs: bool = True
    """Old log-probabilities are the engine's own; otherwise by a forward pass of the trainer."""
    logprob_abs_diff_stop: float = 0.0
    """Largest mean |trainer's - engine's log-probability| of a rollout, in nats, that is trained on; 0: any."""
    ref_load: str | None = None
    """HF checkpoint of the reference model; default: the weights the trainer starts with."""

    max_tokens_per_gpu: int = 8192
    """Most tokens in a packed micro-batch."""
    micro_batch_size: int | None = None
    """Samples in a micro-batch; when set, ``max_tokens_per_gpu`` is not used."""

    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Further options of Megatron-core by their own names (TransformerConfig, OptimizerConfig,
    DistributedDataParallelConfig)."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"--dtype {self.dtype!r}: use auto, fp32 or bf16")
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature {self.temperature} is not above 0; greedy samples have no log-probability to train on"
            )
        if self.lr_decay_style not in LR_DECAY_STYLES:
            raise ConfigError(f"--lr-decay-style {self.lr_decay_style!r} is not one of {', '.join(LR_DECAY_STYLES)}")
        if self.lr_decay_style != "constant" and self.lr_decay_steps is None:
            raise ConfigError(f"--lr-decay-style {self.lr_decay_style} needs lr_decay_steps")

    @classmethod
    def from_config(cls, config: Any, **changes: Any) -> TrainerOptions:
        """Options from an object with attributes of the same names (the run's ``Config``).

        ``rollout_temperature`` becomes ``temperature``, ``distributed_timeout_minutes`` ``timeout_s``, ``total_steps``
        (optimizer steps of the run) ``lr_decay_steps``; with ``use_dynamic_batch_size`` the micro-batch size does not
        count. ``changes`` win over ``config``.
        """
        values = {
            f.name: getattr(config, f.name)
            for f in dataclasses.fields(cls)
            if getattr(config, f.name, None) is not None
        }
        if getattr(config, "rollout_temperature", None) is not None:
            values["temperature"] = config.rollout_temperature
        if getattr(config, "distributed_timeout_minutes", None) is not None:
            values["timeout_s"] = 60.0 * config.distributed_timeout_minutes
        if getattr(config, "total_steps", None) is not None:
            values["lr_decay_steps"] = config.total_steps
        if getattr(config, "use_dynamic_batch_size", False):
            values["micro_batch_size"] = None
        return cls(**{**values, **changes})

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term, 0 when it is off."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0
