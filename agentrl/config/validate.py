"""The one place where a configuration is checked. All problems are reported together, each with its numbers."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.architecture import not_computed
from agentrl.config.derive import batch_rule
from agentrl.config.foreign import remote_code
from agentrl.config.megatron_options import problems as megatron_problems
from agentrl.config.options import options
from agentrl.config.schema import Config, EvalConfig
from agentrl.config.template import template_problems
from agentrl.config.validate_eval import evaluated, rescored
from agentrl.errors import ConfigError


def validate(config: Config | EvalConfig, explicit: Mapping[str, str] | None = None) -> None:
    """Check ``config``, whose derived options are filled.

    Args:
        config: What :func:`agentrl.config.load_config` made, or a configuration built by hand.
        explicit: Options that were given on purpose and where, so that one without effect is refused.

    Raises:
        ConfigError: One line for each problem.
    """
    problems = list(value_problems(config))
    if not problems and isinstance(config, EvalConfig) and config.rescore:
        problems += rescored(config, explicit or {})
        problems += _import_path("--custom-rm-path", config.custom_rm_path)
    elif not problems:  # relations between values that are wrong in themselves would only repeat it
        problems += _environment(config, explicit or {})
        problems += _lengths(config)
        problems += _times(config, explicit or {})
        if not (isinstance(config, EvalConfig) and config.base_url is not None):
            problems += _model(config)
        if isinstance(config, EvalConfig):
            problems += evaluated(config, explicit or {})
        if isinstance(config, Config):
            problems += _batch(config)
            problems += _sampling(config)
            problems += _layout(config)
            problems += _schedule(config)
            problems += _without_effect(config, explicit or {})
        problems += _engines(config, explicit or {})
        problems += template_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))


def value_problems(config: Any) -> Iterator[str]:
    """Each value by itself: its type, range, choices."""
    for option in options(type(config)).values():
        value = getattr(config, option.name)
        limits = f" {option.range}" if option.range is not None else ""
        try:
            read = option.read(value)
            fits = option.range is None or read is None or read in option.range
        except (TypeError, ValueError):
            fits = False
        if not fits:
            yield f"{option.flag}: expected {option.expected}{limits}, got {value!r}"
    if isinstance(getattr(config, "sglang", None), dict):
        yield from remote_code(config.sglang, config.allow_remote_code)


def _environment(config: Config | EvalConfig, explicit: Mapping[str, str]) -> Iterator[str]:
    files_alone = isinstance(config, EvalConfig) and bool(config.eval_prompt_data)
    if not config.env and config.prompt_data is None and not files_alone:
        alone = ", or --eval-prompt-data NAME FILE" if isinstance(config, EvalConfig) else ""
        yield (
            "No environment: give --env NAME (`agentrl env list` shows them), --env path/to/file.py:Class, or "
            f"--prompt-data FILE{alone}."
        )
    if config.env and config.prompt_data is not None:
        named = config.env if isinstance(config.env, str) else ",".join(config.env)
        yield (f"--env {named} and --prompt-data {config.prompt_data} exclude each other: tasks come from one of them.")
    files = [("--prompt-data", config.prompt_data)] if config.prompt_data is not None else []
    names = [name for name, _ in config.eval_prompt_data]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"--eval-prompt-data: the name {name!r} is given more than once; results are reported by name."
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            yield f"--eval-prompt-data: the name {name!r} becomes a file name: letters, digits, '-', '_' and '.' only."
    files += [(f"--eval-prompt-data {name}", path) for name, path in config.eval_prompt_data]
    for flag, path in files:
        yield from _task_data(flag, path)
    if "num_data_workers" in explicit and not config.streaming_data:
        yield f"{explicit['num_data_workers']} has no effect without --streaming-data."
    if not files:
        if "streaming_data" in explicit:
            yield f"{explicit['streaming_data']} has no effect without --prompt-data or --eval-prompt-data."
        for name in ("input_key", "label_key", "metadata_key", "apply_chat_template", "rm_type", "custom_rm_path"):
            if name in explicit:
                yield (
                    f"{explicit[name]} has no effect without --prompt-data or --eval-prompt-data; an environment "
                    "computes its own reward."
                )
    if config.custom_rm_path is not None and "rm_type" in explicit:
        yield f"{explicit['rm_type']} and --custom-rm-path exclude each other: there is one reward."
    if (config.rm_type == "remote_rm") != (config.rm_url is not None):
        yield "--rm-type remote_rm and --rm-url ADDRESS belong together: one of them is missing."
    elif config.rm_url is not None and not config.rm_url.startswith(("http://", "https://")):
        yield f"--rm-url: expected http://HOST:PORT/PATH, got {config.rm_url!r}"
    for name in ("custom_rm_path", "custom_generate_function_path", "data_source_path"):
        yield from _import_path("--" + name.replace("_", "-"), getattr(config, name, None))


def _task_data(flag: str, source: str) -> Iterator[str]:
    """A path, a glob that matches, or the name of a function."""
    if Path(source).exists():
        return
    if glob.has_magic(source):
        if not glob.glob(source, recursive=True):
            yield f"{flag}: no file matches: {source}"
    elif ":" in source:
        yield from _import_path(flag, source)
    else:
        yield f"{flag}: no such file: {source}"


def _import_path(flag: str, spec: str | None) -> Iterator[str]:
    """``module:name`` or ``file.py:name``; a named file must be there."""
    if spec is None:
        return
    place, sep, attribute = spec.rpartition(":")
    if not sep or not place or not attribute.isidentifier():
        dotted = re.fullmatch(r"([\w.]+)\.(\w+)", spec)
        hint = f"; write {dotted[1]}:{dotted[2]}" if dotted else ""
        yield f"{flag}: expected module:name or path/to/file.py:name, got {spec!r}{hint}"
    elif place.endswith(".py") and not Path(place).is_file():
        yield f"{flag}: no such file: {place}"


def _lengths(config: Config | EvalConfig) -> Iterator[str]:
    for limits, response, context in (
        (config, "--rollout-max-response-len", "--rollout-max-context-len"),
        (
            config.held_out,
            "--eval-max-response-len" if config.eval_max_response_len else "--rollout-max-response-len",
            "--eval-max-context-len" if config.eval_max_context_len else "--rollout-max-context-len",
        ),
    ):
        if limits.rollout_max_response_len >= limits.rollout_max_context_len:
            yield (
                f"{response} {limits.rollout_max_response_len} leaves no room for a prompt in {context} "
                f"{limits.rollout_max_context_len}: it must be smaller."
            )
            return


def _times(config: Config | EvalConfig, explicit: Mapping[str, str]) -> Iterator[str]:
    if "episode_step_timeout" in explicit and config.episode_step_timeout > config.episode_timeout:
        yield (
            f"--episode-step-timeout {config.episode_step_timeout:g} has no effect: --episode-timeout "
            f"{config.episode_timeout:g} ends the whole episode before."
        )


def _read_model(folder: str) -> tuple[dict[str, Any] | None, str | None]:
    """``(config.json of a model folder, problem)``; one of them is None."""
    file = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        hint = (
            " A model of the Hub is not fetched by itself: `hf download` it and give the folder."
            if folder.count("/") == 1 and not folder.startswith((".", "/"))
            else ""
        )
        return None, f"no such folder: {folder}.{hint}"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"not a model in Hugging Face form, {file} cannot be read: {error}"
    return (values, None) if isinstance(values, dict) else (None, f"{file} holds no options")


def _model(config: Config | EvalConfig) -> Iterator[str]:
    if config.hf_checkpoint is None:
        yield "--hf-checkpoint: expected a folder with a model in Hugging Face form, got nothing"
        return
    model, problem = _read_model(config.hf_checkpoint)
    if model is None:
        yield f"--hf-checkpoint: {problem}"
        return
    positions = model.get("max_position_embeddings")
    for name in ("rollout_max_context_len", "eval_max_context_len"):
        given = getattr(config, name)
        if isinstance(positions, int) and given is not None and given > positions:
            yield (
                f"--{name.replace('_', '-')} {given} is more than the model's max_position_embeddings {positions}: "
                f"give at most {positions}."
            )
    if isinstance(config, Config):
        for problem in not_computed(model):
            yield f"--hf-checkpoint {config.hf_checkpoint}: in config.json, {problem}."
        if config.ref_load is not None and config.use_kl_loss:
            problem = _read_model(config.ref_load)[1]
            if problem is not None:
                yield f"--ref-load: {problem}"
        yield from _shape(config, model)


def _shape(config: Config, model: dict[str, Any]) -> Iterator[str]:
    """Megatron's own flags and the parallel layout against the model."""
    yield from megatron_problems(config.megatron, model)
    for flag, parts, key in (
        ("--tensor-model-parallel-size", config.tensor_model_parallel_size, "num_attention_heads"),
        ("--tensor-model-parallel-size", config.tensor_model_parallel_size, "num_key_value_heads"),
        ("--pipeline-model-parallel-size", config.pipeline_model_parallel_size, "num_hidden_layers"),
    ):
        size = model.get(key)
        uneven = key == "num_hidden_layers" and any(
            name.endswith(("pipeline_stage", "_layout", "pipeline_split")) for name in config.megatron
        )
        if isinstance(size, int) and size % parts and not uneven:
            yield f"{flag} {parts} does not divide the model's {key} {size}."
    experts = next(
        (
            model[key]
            for key in ("num_experts", "n_routed_experts", "num_local_experts")
            if isinstance(model.get(key), int)
        ),
        0,
    )
    if config.expert_model_parallel_size > 1 and (not experts or experts % config.expert_model_parallel_size):
        has = f"has {experts} experts" if experts else "has no experts"
        yield f"--expert-model-parallel-size {config.expert_model_parallel_size} does not fit: the model {has}."


def _batch(config: Config) -> Iterator[str]:
    product = config.rollout_batch_size * config.n_samples_per_prompt
    size, steps = config.global_batch_size, config.num_steps_per_rollout
    if size is None or steps is None or product != size * steps:
        yield (
            f"The batch does not add up: {batch_rule(config, size, steps)}. Change one of the four, or leave "
            "--global-batch-size out."
        )
    elif size < config.data_parallel_size:
        yield (
            f"--global-batch-size {size} is less than the {config.data_parallel_size} data-parallel ranks: each "
            "needs at least one episode a step."
        )
    if config.n_samples_per_prompt < 2:
        yield (
            "--n-samples-per-prompt 1 teaches nothing: grpo compares the episodes of one task, and one alone has "
            "advantage 0. Give at least 2."
        )


def _sampling(config: Config) -> Iterator[str]:
    if config.rollout_top_p != 1.0:
        yield (
            f"--rollout-top-p {config.rollout_top_p:g} cannot be trained on: the engine's log-probabilities are "
            "of the full softmax, "
            "before truncation, so the ratio between trainer and rollout would be wrong. Leave it at 1."
        )


def _layout(config: Config) -> Iterator[str]:
    tensor, pipeline, context = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    if context > 1:
        yield (
            f"--context-parallel-size {context} is not available yet: splitting a sequence needs TransformerEngine's "
            "attention, which the trainer does not use so far. Leave it at 1."
        )
        return
    if config.world_size % config.model_parallel_size:
        yield (
            f"The trainer has --actor-num-nodes {config.actor_num_nodes} × --actor-num-gpus-per-node "
            f"{config.actor_num_gpus_per_node} = "
            f"{config.world_size} ranks, not a multiple of tensor {tensor} × pipeline {pipeline} × context "
            f"{context} = {config.model_parallel_size}."
        )
    elif (
        config.expert_model_parallel_size > 1
        and (tensor * config.data_parallel_size * context) % config.expert_model_parallel_size
    ):
        yield (
            f"--expert-model-parallel-size {config.expert_model_parallel_size} does not divide the "
            f"{tensor * config.data_parallel_size * context} "
            f"ranks of one pipeline stage."
        )
    if config.sequence_parallel and tensor == 1:
        yield (
            "--sequence-parallel splits activations between tensor-parallel ranks: it needs "
            "--tensor-model-parallel-size of at least 2."
        )


def _schedule(config: Config) -> Iterator[str]:
    if config.lr_warmup_steps > config.total_steps:
        yield f"--lr-warmup-steps {config.lr_warmup_steps} is more than the run's {config.total_steps} optimizer steps."
    if config.min_lr > config.lr:
        yield f"--min-lr {config.min_lr:g} is more than --lr {config.lr:g}."
    warn, stop = config.logprob_abs_diff_warn, config.logprob_abs_diff_stop
    if warn and stop and warn > stop:
        yield f"--logprob-abs-diff-warn {warn:g} is more than --logprob-abs-diff-stop {stop:g}: the run stops first."
    if config.eps_clip_high is not None and config.eps_clip_high < config.eps_clip:
        yield (
            f"--eps-clip-high {config.eps_clip_high:g} is less than --eps-clip {config.eps_clip:g}: the upper "
            "range is the wider one."
        )


_NEEDS = {
    "micro_batch_size": ("--no-use-dynamic-batch-size", lambda c: not c.use_dynamic_batch_size),
    "max_tokens_per_gpu": ("--use-dynamic-batch-size", lambda c: c.use_dynamic_batch_size),
    "kl_loss_coef": ("--use-kl-loss", lambda c: c.use_kl_loss),
    "kl_loss_type": ("--use-kl-loss", lambda c: c.use_kl_loss),
    "ref_load": ("--use-kl-loss", lambda c: c.use_kl_loss),
    "wandb_project": ("--use-wandb", lambda c: c.use_wandb),
    "min_lr": ("--lr-decay-style linear or cosine", lambda c: c.lr_decay_style != "constant"),
    "eval_prompt_data": ("--eval-interval", lambda c: c.eval_interval > 0),
    "eval_env": ("--eval-interval", lambda c: c.eval_interval > 0),
    "eval_own_split": ("--eval-interval", lambda c: c.eval_interval > 0),
    "eval_before_train": ("--eval-interval", lambda c: c.eval_interval > 0),
    "best_metric": ("--eval-interval", lambda c: c.eval_interval > 0),
}


def _without_effect(config: Config, explicit: Mapping[str, str]) -> Iterator[str]:
    """Options given on purpose that would do nothing."""
    for name, (needed, holds) in _NEEDS.items():
        if name in explicit and not holds(config):
            yield f"{explicit[name]} has no effect without {needed}."
    dotted = sorted(key for key in config.env_args if "." in key)
    if dotted and not config.eval_env and not config.eval_prompt_data:
        yield (
            f"--env-arg {dotted[0]}: arguments of --env have no name before them; those of an --eval-env or "
            "--eval-prompt-data do."
        )


def _engines(config: Config | EvalConfig, explicit: Mapping[str, str]) -> Iterator[str]:
    engines, gpus, each = config.rollout_num_engines, config.rollout_num_gpus, config.rollout_num_gpus_per_engine
    if engines is not None and gpus is not None and engines * each != gpus:
        yield (
            f"--rollout-num-engines {engines} × --rollout-num-gpus-per-engine {each} = {engines * each}, but "
            f"--rollout-num-gpus is {gpus}."
        )
    if config.deterministic and isinstance(config, EvalConfig) and "threads" in explicit:
        yield f"{explicit['threads']} has no effect with --deterministic: each engine has one thread."
