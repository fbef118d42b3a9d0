"""What follows from what: the options that may be left out because others determine them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, TypeVar

from agentrl.config.presets import DEMO, model_folder
from agentrl.config.schema import Config, EngineOptions, EvalConfig
from agentrl.errors import ConfigError
from agentrl.loading import is_spec

DERIVED = {
    "global_batch_size": ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"),
    "num_steps_per_rollout": ("global_batch_size",),
    "rollout_num_engines": ("rollout_num_gpus", "colocate"),
    "rollout_num_gpus": (
        *("rollout_num_engines", "rollout_num_gpus_per_engine"),
        *("colocate", "actor_num_nodes", "actor_num_gpus_per_node"),
    ),
    "offload_train": ("colocate",),
    "offload_rollout": ("colocate",),
    "actor_num_gpus_per_node": (
        *("actor_num_nodes", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ),
    "eps_clip_high": ("eps_clip",),
    "loss_scale_factor": ("rollout_max_context_len", "rollout_max_response_len", "max_turns"),
    "overlong_max_len": ("rollout_max_context_len", "rollout_max_response_len", "max_turns"),
    "overlong_buffer_len": ("overlong_max_len", "rollout_max_context_len", "rollout_max_response_len", "max_turns"),
    "ref_load": ("hf_checkpoint",),
    "store_train_tokens": ("rollout_batch_size", "n_samples_per_prompt", "rollout_max_context_len"),
}
"""Options that follow from others. A run's saved value of one is not kept when what it follows from is given anew."""

AnyConfig = TypeVar("AnyConfig", Config, EvalConfig)


STORED_TOKENS = 4_000_000
"""Tokens of a rollout up to which each is stored with what it was trained with, unless told otherwise."""


def batch_rule(config: Config, global_batch_size: Any, num_steps_per_rollout: Any) -> str:
    """The batch rule with the numbers of ``config`` in it, for messages."""
    product = config.rollout_batch_size * config.n_samples_per_prompt
    return (
        "the batch rule is rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout, "
        f"here {config.rollout_batch_size} × {config.n_samples_per_prompt} = {product} against "
        f"{global_batch_size} × {num_steps_per_rollout}"
    )


def derive(config: AnyConfig) -> AnyConfig:
    """``config`` with the options filled that were left to follow from others.
    Raises ConfigError: what was given cannot be completed (the batch rule has no whole solution, for one)."""
    changes: dict[str, Any] = {}
    if isinstance(config, Config) and config.actor_num_gpus_per_node is None:
        ranks = max(1, -(-config.model_parallel_size // max(1, config.actor_num_nodes)))
        config = config.replace(actor_num_gpus_per_node=ranks)
    changes |= _engines(config)
    served = isinstance(config, EvalConfig) and config.base_url is not None
    if config.hf_checkpoint is not None or not served:
        changes["hf_checkpoint"] = model_folder(config.hf_checkpoint or DEMO)
    changes["eval_env"] = split_names(config.eval_env)
    if isinstance(config, EvalConfig):
        return config.replace(**changes, env=split_names(config.env))
    changes |= _batch(config)
    changes["debug_train_only"] = config.debug_train_only or config.load_debug_rollout_data is not None
    changes["chat_template_date"] = config.chat_template_date or datetime.date.today().isoformat()
    changes["eps_clip_high"] = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    longest = config.rollout_max_context_len
    if not config.is_supervised:
        longest = min(longest, config.max_turns * config.rollout_max_response_len)
    if constant_length(config):
        changes["loss_scale_factor"] = config.loss_scale_factor or longest
    if config.overlong_handling == "penalty":
        limit = changes["overlong_max_len"] = config.overlong_max_len or longest
        changes["overlong_buffer_len"] = config.overlong_buffer_len or max(1, limit // 5)
    if config.store_train_tokens is None:
        episodes = config.rollout_batch_size * config.n_samples_per_prompt
        changes["store_train_tokens"] = episodes * config.rollout_max_context_len <= STORED_TOKENS
    if config.colocate:
        for name in ("offload_train", "offload_rollout"):
            changes[name] = getattr(config, name) is not False
    if config.use_kl_loss or config.kl_coef:
        changes["ref_load"] = model_folder(config.ref_load or changes["hf_checkpoint"])
    return config.replace(**changes)


def constant_length(config: Config) -> bool:
    """Whether the loss of a trajectory is, or may be, divided by ``--loss-scale-factor``."""
    divided = config.advantage_estimator == "dr_grpo" or is_spec(config.advantage_estimator)
    return config.loss_agg_mode == "seq-mean-token-sum-norm" or (config.loss_agg_mode is None and divided)


def split_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names given one by one, or several with commas between."""
    return tuple(part.strip() for name in names for part in name.split(",") if part.strip())


def _batch(config: Config) -> dict[str, int]:
    size, steps = config.global_batch_size, config.num_steps_per_rollout
    product = config.rollout_batch_size * config.n_samples_per_prompt
    if size is not None and steps is not None:
        return {}
    flag, known = "--global-batch-size", size
    if known is None:
        steps = 1 if steps is None else steps
        flag, known = "--num-steps-per-rollout", steps
    if product % known:
        rule = batch_rule(config, "?" if size is None else size, "?" if steps is None else steps)
        raise ConfigError(f"{flag} {known} does not divide the rollout: {rule}. Give a divisor of {product}.")
    return {"global_batch_size": size or product // known, "num_steps_per_rollout": steps or product // known}


def _engines(config: EngineOptions) -> dict[str, int]:
    engines, gpus, each = config.rollout_num_engines, config.rollout_num_gpus, config.rollout_num_gpus_per_engine
    if engines is not None and gpus is not None:
        return {}
    if gpus is None:
        if engines is None:
            engines = max(1, config.world_size // each) if isinstance(config, Config) and config.takes_turns else 1
        return {"rollout_num_engines": engines, "rollout_num_gpus": engines * each}
    if gpus % each:
        raise ConfigError(
            f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine {each}: "
            f"give {gpus // each * each or each} or {(gpus // each + 1) * each}."
        )
    return {"rollout_num_engines": gpus // each}
