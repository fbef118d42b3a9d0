"""The one place where a configuration is checked. All problems are reported together, each with its numbers."""

from __future__ import annotations

import dataclasses
import glob
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.derive import batch_rule, constant_length
from agentrl.config.foreign import remote_code
from agentrl.config.megatron_options import layout_problems
from agentrl.config.megatron_options import problems as megatron_problems
from agentrl.config.options import options
from agentrl.config.schema import (
    AlgorithmOptions,
    ColocationOptions,
    Config,
    CriticOptions,
    EngineOptions,
    EnvironmentOptions,
    EvalConfig,
    EvaluationOptions,
    LimitOptions,
    PassedOn,
    ReplayOptions,
    SamplingOptions,
    SyncOptions,
    TrainingEvaluationOptions,
)
from agentrl.config.template import template_problems
from agentrl.errors import ConfigError, DataError
from agentrl.families.family import experts_of
from agentrl.families.fields import not_computed
from agentrl.families.torch_dist import advice, is_megatrons
from agentrl.jsonl import read_json
from agentrl.loading import is_spec

Explicit = Mapping[str, str]
"""Options that were given on purpose, and where (``--lr``, or file and key)."""


def validate(config: Config | EvalConfig, explicit: Explicit | None = None) -> None:
    """Check ``config``, whose derived options are filled.

    Args:
        config: What :func:`agentrl.config.load_config` made, or a configuration built by hand.
        explicit: Options that were given on purpose and where, so that one without effect is refused.

    Raises:
        ConfigError: One line for each problem.
    """
    given = explicit or {}
    problems = list(value_problems(config))
    if not problems and isinstance(config, EvalConfig) and config.rescore:
        problems += [*_rescored(config, given), *import_problems("--custom-rm-path", config.custom_rm_path)]
    elif not problems:  # relations between values that are wrong in themselves would only repeat it
        if isinstance(config, Config) and config.is_supervised:
            problems += _supervised(config, given)
        elif isinstance(config, EvalConfig) or config.plays:
            problems += [*_tasks(config, given), *_limits(config, given)]
        if not (isinstance(config, EvalConfig) and config.base_url is not None):
            problems += _model(config)
        if isinstance(config, EvalConfig):
            problems += _evaluated(config, given)
        else:
            problems += [*_batch(config), *_layout(config), *_numbers(config), *_halves(config)]
            problems += _colocated(config)
            problems += _without_effect(config, given)
        problems += [*_engines(config, given), *template_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def value_problems(config: object) -> Iterator[str]:
    """Each value by itself: its type, range, choices."""
    kind: type = type(config)
    for option in options(kind).values():
        value = getattr(config, option.name)
        limits = f" {option.range}" if option.range is not None else ""
        try:
            read = option.read(value)
            fits = option.range is None or read is None or read in option.range
        except (TypeError, ValueError):
            fits = False
        if not fits:
            yield f"{option.flag}: expected {option.expected}{limits}, got {value!r}"
    if isinstance(config, PassedOn) and isinstance(config.sglang, dict):
        yield from remote_code(config.sglang, config.allow_remote_code)


# -- tasks and rewards ---------------------------------------------------------------------------------------


def _tasks(config: Config | EvalConfig, given: Explicit) -> Iterator[str]:
    if (
        not config.env
        and config.prompt_data is None
        and not (isinstance(config, EvalConfig) and config.eval_prompt_data)
    ):
        alone = ", or --eval-prompt-data NAME FILE" if isinstance(config, EvalConfig) else ""
        yield (
            "No environment: give --env NAME (`agentrl env list` shows them), --env path/to/file.py:Class, or "
            f"--prompt-data FILE{alone}."
        )
    if config.env and config.prompt_data is not None:
        named = config.env if isinstance(config.env, str) else ",".join(config.env)
        yield f"--env {named} and --prompt-data {config.prompt_data} exclude each other: tasks come from one of them."
    names = [name for name, _ in config.eval_prompt_data]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"--eval-prompt-data: the name {name!r} is given more than once; results are reported by name."
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            yield f"--eval-prompt-data: the name {name!r} becomes a file name: letters, digits, '-', '_' and '.' only."
    files = [("--prompt-data", config.prompt_data)] if config.prompt_data is not None else []
    files += [(f"--eval-prompt-data {name}", path) for name, path in config.eval_prompt_data]
    for flag, path in files:
        if not Path(path).exists():
            if not glob.has_magic(path) and ":" in path:
                yield from import_problems(flag, path)
            elif not (glob.has_magic(path) and glob.glob(path, recursive=True)):
                yield f"{flag}: no {'file matches' if glob.has_magic(path) else 'such file'}: {path}"
    if "num_data_workers" in given and not config.streaming_data:
        yield f"{given['num_data_workers']} has no effect without --streaming-data."
    rewards = ("input_key", "label_key", "metadata_key", "apply_chat_template", "rm_type", "custom_rm_path")
    for name in ("streaming_data", *rewards) if not files else ():
        if name in given:
            own = "; an environment computes its own reward" if name in rewards else ""
            yield f"{given[name]} has no effect without --prompt-data or --eval-prompt-data{own}."
    if config.custom_rm_path is not None and "rm_type" in given:
        yield f"{given['rm_type']} and --custom-rm-path exclude each other: there is one reward."
    if (config.rm_type == "remote_rm") != (config.rm_url is not None):
        yield "--rm-type remote_rm and --rm-url ADDRESS belong together: one of them is missing."
    elif config.rm_url is not None and not config.rm_url.startswith(("http://", "https://")):
        yield f"--rm-url: expected http://HOST:PORT/PATH, got {config.rm_url!r}"
    for name in ("custom_rm_path", "custom_generate_function_path", "data_source_path", "custom_loss_function_path"):
        yield from import_problems("--" + name.replace("_", "-"), getattr(config, name, None))


_PLAYED = (
    *(EnvironmentOptions, SamplingOptions, LimitOptions, EngineOptions, SyncOptions, ColocationOptions),
    *(EvaluationOptions, TrainingEvaluationOptions, CriticOptions, AlgorithmOptions, ReplayOptions),
)
_LEARNED = ("rollout_max_context_len", "loss_type", "loss_agg_mode", "loss_scale_factor", "custom_loss_function_path")
_NOT_SUPERVISED = {
    *(field.name for section in _PLAYED for field in dataclasses.fields(section)),
    *("n_samples_per_prompt", "data_source_path", "curriculum_path", "store_train_tokens"),
    *("sglang", "allow_remote_code"),
} - {*_LEARNED, "eval_interval", "eval_before_train", "rollout_temperature"}
"""Options that say how episodes are played, and how a policy is trained on them."""


def _supervised(config: Config, given: Explicit) -> Iterator[str]:
    """What supervised training needs, and what has no part in it."""
    data, run = config.train_data, config.sft_from
    if (data is None) == (run is None):
        both = "exclude each other" if data is not None else "are both missing"
        yield f"--loss-type sft_loss: --train-data FILE and --sft-from RUN {both}: one of them says what is learned."
    for flag, path in (("--train-data", data), ("--eval-data", config.eval_data)):
        if path is not None and not Path(path).exists() and not glob.glob(path, recursive=True):
            yield f"{flag}: no {'file matches' if glob.has_magic(path) else 'such file'}: {path}"
    if run is not None and not (Path(run) / "trajectories").is_dir():
        yield f"--sft-from {run}: not a run folder: it has no folder `trajectories`."
    if "sft_min_reward" in given and run is None:
        yield f"{given['sft_min_reward']} has no effect without --sft-from."
    if config.eval_interval and config.eval_data is None:
        yield (
            f"--eval-interval {config.eval_interval}: with --loss-type sft_loss no engine runs, so nothing is played "
            "on the way. Give --eval-data FILE for the loss on held-out conversations, and evaluate a checkpoint as an "
            "agent: agentrl eval --run RUN --env NAME."
        )
    if config.n_samples_per_prompt != 1:
        yield f"--n-samples-per-prompt {config.n_samples_per_prompt}: --loss-type sft_loss learns each once: give 1."
    if config.rollout_temperature != 1.0:
        yield f"--rollout-temperature {config.rollout_temperature:g}: with --loss-type sft_loss it must be 1."
    for name in given:
        if name == "prompt_data":
            yield f"{given[name]} names tasks, which are played: with --loss-type sft_loss give --train-data the file."
        elif name in _NOT_SUPERVISED:
            yield f"{given[name]} has no effect with --loss-type sft_loss: nothing is played."
    yield from import_problems("--custom-loss-function-path", config.custom_loss_function_path)


def _halves(config: Config) -> Iterator[str]:
    """What half a run cannot give."""
    half = "--debug-rollout-only" if config.debug_rollout_only else "--load-debug-rollout-data"
    if config.trains and not config.debug_train_only:
        return
    if config.is_supervised:
        yield f"{half} is of a training on episodes: with --loss-type sft_loss, --sft-from RUN learns stored ones."
        return
    if config.eval_interval:
        why = "the model stays as it is: agentrl eval evaluates it" if config.debug_rollout_only else "no engine runs"
        yield f"--eval-interval {config.eval_interval}: with {half} {why}. Give 0, or leave it out."
    if config.debug_rollout_only:
        yield from _nothing_trained(config)
    elif (data := config.load_debug_rollout_data) is None:
        yield "--debug-train-only needs --load-debug-rollout-data RUN: the run whose stored rollouts are trained on."
    elif config.output_dir is not None and Path(config.output_dir).resolve() in (
        Path(data).resolve(),
        Path(data).resolve().parent,
    ):
        yield f"--output-dir {config.output_dir} holds the rollouts of --load-debug-rollout-data: give another folder."


def _nothing_trained(config: Config) -> Iterator[str]:
    if config.debug_train_only:
        yield "--debug-rollout-only and --debug-train-only exclude each other: nothing would be left of the run."
    nothing = "with --debug-rollout-only nothing is trained"
    if config.load is not None:
        yield (
            f"--load {config.load}: {nothing}, so there is nothing to go on with. To play with a checkpoint's weights, "
            "give --hf-checkpoint its folder hf."
        )
    for flag, asked in (("--save", config.save), ("--save-hf", config.save_hf), ("--best-metric", config.best_metric)):
        if asked is not None:
            yield f"{flag} {asked}: {nothing}, so there is nothing to save."
    if config.auto_resume:
        yield f"--auto-resume: {nothing} and no checkpoint is written, so there is nothing to go on from."
    if config.replay_share:
        yield f"--replay-share {config.replay_share:g}: {nothing}, so there is nothing to train on again."
    if config.max_staleness is not None:
        yield f"--max-staleness {config.max_staleness}: {nothing}, so weights do not grow old."


def import_problems(flag: str, spec: str | None) -> Iterator[str]:
    """What is wrong with ``module:name`` or ``file.py:name``; a named file must be there."""
    if spec is None:
        return
    place, sep, attribute = spec.rpartition(":")
    if not sep or not place or not attribute.isidentifier():
        dotted = re.fullmatch(r"([\w.]+)\.(\w+)", spec)
        hint = f"; write {dotted[1]}:{dotted[2]}" if dotted else ""
        yield f"{flag}: expected module:name or path/to/file.py:name, got {spec!r}{hint}"
    elif place.endswith(".py") and not Path(place).is_file():
        yield f"{flag}: no such file: {place}"


def _limits(config: Config | EvalConfig, given: Explicit) -> Iterator[str]:
    for limits, side in ((config, "rollout"), (config.held_out, "eval")):
        response, context = limits.rollout_max_response_len, limits.rollout_max_context_len
        if response >= context:
            flags = [
                f"--{side if getattr(config, f'{side}_{name}') else 'rollout'}-{name.replace('_', '-')}"
                for name in ("max_response_len", "max_context_len")
            ]
            yield f"{flags[0]} {response} leaves no room for a prompt in {flags[1]} {context}: it must be smaller."
            break
    if "episode_step_timeout" in given and config.episode_step_timeout > config.episode_timeout:
        yield (
            f"--episode-step-timeout {config.episode_step_timeout:g} has no effect: --episode-timeout "
            f"{config.episode_timeout:g} ends the whole episode before."
        )


# -- the model -----------------------------------------------------------------------------------------------


def _read_model(folder: str, like: str | None = None) -> dict[str, Any] | str:
    """``config.json`` of a model folder, or what is wrong with it; ``like`` is another of that architecture."""
    file = Path(folder) / "config.json"
    if not file.is_file() and is_megatrons(Path(folder)):
        return advice(folder, like)
    if not Path(folder).is_dir():
        of_the_hub = folder.count("/") == 1 and not folder.startswith((".", "/"))
        hint = " A model of the Hub is not fetched by itself: `hf download` it and give the folder."
        return f"no such folder: {folder}.{hint if of_the_hub else ''}"
    try:
        return read_json(file)
    except DataError as error:
        return f"not a model in Hugging Face form: {error}"


def _model(config: Config | EvalConfig) -> Iterator[str]:
    if config.hf_checkpoint is None:
        yield "--hf-checkpoint: expected a folder with a model in Hugging Face form, got nothing"
        return
    model = _read_model(config.hf_checkpoint)
    if isinstance(model, str):
        yield f"--hf-checkpoint: {model}"
        return
    positions = model.get("max_position_embeddings")
    for name in ("rollout_max_context_len", "eval_max_context_len"):
        length = getattr(config, name)
        if isinstance(positions, int) and length is not None and length > positions:
            yield (
                f"--{name.replace('_', '-')} {length} is more than the model's max_position_embeddings {positions}: "
                f"give at most {positions}."
            )
    if isinstance(config, Config):
        for problem in not_computed(model):
            yield f"--hf-checkpoint {config.hf_checkpoint}: in config.json, {problem}."
        if (
            config.ref_load is not None
            and _has_reference(config)
            and isinstance(reference := _read_model(config.ref_load, config.hf_checkpoint), str)
        ):
            yield f"--ref-load: {reference}"
        if config.critic_load is not None and _has_critic(config):
            critic = _read_model(config.critic_load, config.hf_checkpoint)
            for problem in [critic] if isinstance(critic, str) else not_computed(critic):
                yield f"--critic-load {config.critic_load}: {problem}."
            if not isinstance(critic, str) and critic.get("vocab_size") != model.get("vocab_size"):
                yield (
                    f"--critic-load {config.critic_load} has a vocab_size of {critic.get('vocab_size')}, the policy of "
                    f"{model.get('vocab_size')}: they must share their tokens."
                )
        yield from megatron_problems(config.megatron, model)
        yield from _parallel(config, model)


def _parallel(config: Config, model: dict[str, Any]) -> Iterator[str]:
    """The parallel layout against the model."""
    tensor = config.tensor_model_parallel_size
    sizes = [(f"--tensor-model-parallel-size {tensor}", tensor, "num_attention_heads")]
    sizes += [(f"--tensor-model-parallel-size {tensor}", tensor, "num_key_value_heads")]
    for given, parts, key in sizes:
        if isinstance(size := model.get(key), int) and size % parts:
            yield f"{given} does not divide the model's {key} {size}."
    layers = model.get("num_hidden_layers")
    yield from layout_problems(config.megatron, config, layers if isinstance(layers, int) else None)
    experts = experts_of(model)
    if config.expert_model_parallel_size > 1 and (not experts or experts % config.expert_model_parallel_size):
        has = f"has {experts} experts" if experts else "has no experts"
        yield f"--expert-model-parallel-size {config.expert_model_parallel_size} does not fit: the model {has}."
    elif experts and tensor > 1 and not config.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {tensor}: Megatron trains a mixture of experts so only with "
            "--sequence-parallel. Add it."
        )


# -- training ------------------------------------------------------------------------------------------------


def _batch(config: Config) -> Iterator[str]:
    product = config.rollout_batch_size * config.n_samples_per_prompt
    size, steps = config.global_batch_size, config.num_steps_per_rollout
    if size is None or steps is None or product != size * steps:
        rule = batch_rule(config, size, steps)
        yield f"The batch does not add up: {rule}. Change one of the four, or leave --global-batch-size out."
    elif size < config.data_parallel_size:
        yield (
            f"--global-batch-size {size} is less than the {config.data_parallel_size} data-parallel ranks: each "
            "needs at least one episode a step."
        )
    if config.rollout_top_p != 1.0:
        yield (
            f"--rollout-top-p {config.rollout_top_p:g} cannot be trained on: the engine's log-probabilities are of the "
            "full softmax, before truncation, so the ratio between trainer and rollout would be wrong. Leave it at 1."
        )


def _layout(config: Config) -> Iterator[str]:
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    context, expert = config.context_parallel_size, config.expert_model_parallel_size
    if context > 1:
        yield (
            f"--context-parallel-size {context} is not available: it cuts each sequence in slices, the trainer packs "
            "and weighs sequences that are whole, and only TransformerEngine's attention computes on slices. Leave it "
            "at 1; --sequence-parallel splits activations."
        )
        return
    stage = tensor * config.data_parallel_size * context
    if config.world_size % config.model_parallel_size:
        yield (
            f"The trainer has --actor-num-nodes {config.actor_num_nodes} × --actor-num-gpus-per-node "
            f"{config.actor_num_gpus_per_node} = {config.world_size} ranks, not a multiple of tensor {tensor} × "
            f"pipeline {pipeline} × context {context} = {config.model_parallel_size}."
        )
    elif expert > 1 and stage % expert:
        yield f"--expert-model-parallel-size {expert} does not divide the {stage} ranks of one pipeline stage."
    if config.sequence_parallel and tensor == 1:
        yield (
            "--sequence-parallel splits activations between tensor-parallel ranks: it needs "
            "--tensor-model-parallel-size of at least 2."
        )


def _numbers(config: Config) -> Iterator[str]:
    yield from _more_than(config)
    yield from _asynchronous(config)
    yield from _filtered(config)
    if config.lr_decay_style == "WSD" and config.lr_wsd_decay_steps is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-steps: the last optimizer steps, over which it decays."
    if config.num_critic_only_steps >= config.num_rollout:
        yield (
            f"--num-critic-only-steps {config.num_critic_only_steps} leaves none of the {config.num_rollout} rollouts "
            "of --num-rollout for the policy."
        )
    ratio = config.advantage_estimator != "cispo"  # which clips a weight, and as published only from above
    if ratio and config.eps_clip_high is not None and config.eps_clip_high < config.eps_clip:
        yield (
            f"--eps-clip-high {config.eps_clip_high:g} is less than --eps-clip {config.eps_clip:g}: the upper "
            "range is the wider one."
        )


def _more_than(config: Config) -> Iterator[str]:
    """Numbers that another one limits (None, 0: it does not)."""
    steps, stop = _policy_steps(config), config.logprob_abs_diff_stop or None
    after_warmup = steps - config.lr_warmup_steps if config.lr_decay_style == "WSD" else None
    limits: tuple[tuple[str, float | None, str], ...] = (
        ("lr_warmup_steps", steps, "the policy's {} optimizer steps"),
        ("critic_lr_warmup_steps", config.total_steps, "the critic's {} optimizer steps"),
        ("lr_wsd_decay_steps", after_warmup, "the {} optimizer steps of the run after the warm-up"),
        ("start_weight_decay", config.weight_decay, "--weight-decay {}, to which it grows"),
        ("min_lr", config.lr, "--lr {}"),
        ("min_lr", config.critic_lr if _has_critic(config) else None, "--critic-lr {}"),
        ("logprob_abs_diff_warn", stop, "--logprob-abs-diff-stop {}: the run stops first"),
        ("overlong_buffer_len", config.overlong_max_len, "--overlong-max-len {}"),
        ("rollout_num_workers", config.rollout_concurrency, "the {} episodes of --rollout-concurrency"),
    )
    for name, most, of_what in limits:
        value = getattr(config, name)
        if value and most is not None and value > most:
            told, limit = (f"{number:g}" if isinstance(number, float) else str(number) for number in (value, most))
            yield f"--{name.replace('_', '-')} {told} is more than {of_what.format(limit)}."


def _policy_steps(config: Config) -> int:
    """Optimizer steps of the policy, over which its learning rate goes its way."""
    rollouts = max(0, config.num_rollout - config.num_critic_only_steps)
    return rollouts * (config.num_steps_per_rollout or 1)


def _filtered(config: Config) -> Iterator[str]:
    at_once = config.over_sampling_batch_size
    if at_once is not None and at_once < config.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {at_once} is less than --rollout-batch-size {config.rollout_batch_size}: it "
            "is the number of tasks handed out at once to fill a rollout."
        )
    if config.partial_rollout and (at_once or 0) <= config.rollout_batch_size:
        yield (
            f"--partial-rollout needs an --over-sampling-batch-size above --rollout-batch-size "
            f"{config.rollout_batch_size}, such as {2 * config.rollout_batch_size}: a rollout ends when the first "
            f"{config.rollout_batch_size} tasks of so many have finished."
        )
    if config.replay_share and config.mask_offpolicy_in_partial_rollout:
        yield (
            "--mask-offpolicy-in-partial-rollout leaves the old tokens out of the loss that --replay-share takes into "
            "the batch: give one of them."
        )
    size, again = config.rollout_batch_size, config.replayed_groups
    if config.replay_share and not 0 < again < size:
        yield (
            f"--replay-share {config.replay_share:g} of --rollout-batch-size {size} is {again} groups, which leaves "
            f"{'nothing to replay' if not again else 'no new task'}: give a share of 1 to {size - 1} groups."
        )


def _asynchronous(config: Config) -> Iterator[str]:
    ahead, interval, limit = config.async_buffer_size, config.update_weights_interval, config.max_staleness
    oldest, sizes = config.oldest_version, f"--async-buffer-size {ahead} and --update-weights-interval {interval}"
    if config.partial_rollout:  # what is in play at once is taken by so many rollouts
        at_once = config.over_sampling_batch_size or config.rollout_batch_size
        oldest += math.ceil(at_once / config.rollout_batch_size) - 1
        sizes += f", and --over-sampling-batch-size {at_once} in rollouts of {config.rollout_batch_size},"
    if limit is not None and limit < oldest:
        yield (
            f"--max-staleness {limit} would have rollouts played again: with {sizes} tokens become {oldest} versions "
            "old. Give at least that, or a smaller buffer or interval."
        )
    if config.deterministic and config.partial_rollout:
        yield (
            "--partial-rollout and --deterministic exclude each other: which episodes are trained on depends on how "
            "long they take."
        )
    if config.deterministic and ahead:
        yield (
            f"--async-buffer-size {ahead} and --deterministic exclude each other: which weights sample a token depends "
            "on the moment at which they arrive."
        )


def _colocated(config: Config) -> Iterator[str]:
    """What does not go together with two sides that take turns on the same devices."""
    if not config.takes_turns:
        return
    engines, each = config.rollout_num_engines or 1, config.rollout_num_gpus_per_engine
    a_node = config.actor_num_gpus_per_node or 1
    if config.async_buffer_size:
        yield (
            f"--async-buffer-size {config.async_buffer_size} and --colocate exclude each other: nobody generates while "
            "the trainer has the devices. Give 0, or devices of their own to both sides."
        )
    if engines * each > config.world_size:
        yield (
            f"--colocate puts engines on the devices of the {config.world_size} trainer ranks, and {engines} engines "
            f"of {each} take {engines * each}: give --rollout-num-gpus {config.world_size // each * each or each}, or "
            "leave it out."
        )
    elif config.actor_num_nodes > 1 and a_node % each:
        yield (
            f"--rollout-num-gpus-per-engine {each} does not divide the {a_node} ranks of a machine: with --colocate an "
            "engine would straddle two."
        )
    if config.pause_mode != "retract" and config.offload_rollout:
        yield (
            f"--pause-mode {config.pause_mode} and --colocate exclude each other: engines that give their KV cache "
            "back put requests in flight back into their queue, which is `retract`."
        )


def _has_reference(config: Config) -> bool:
    return config.use_kl_loss or config.kl_coef > 0 or is_spec(config.advantage_estimator)


def _has_critic(config: Config) -> bool:
    return config.advantage_estimator == "ppo" or is_spec(config.advantage_estimator)


_CRITIC = tuple(field.name for field in dataclasses.fields(CriticOptions))
_NEEDS: dict[str, tuple[Callable[[Config], bool], tuple[str, ...]]] = {
    "--no-use-dynamic-batch-size": (lambda c: not c.use_dynamic_batch_size, ("micro_batch_size",)),
    "--use-dynamic-batch-size": (lambda c: c.use_dynamic_batch_size, ("max_tokens_per_gpu",)),
    "--use-kl-loss": (lambda c: c.use_kl_loss, ("kl_loss_coef", "use_unbiased_kl")),
    "--use-kl-loss or --kl-coef": (lambda c: _has_reference(c), ("ref_load", "kl_loss_type", "ref_update_interval")),
    "--use-tis": (lambda c: c.use_tis, ("tis_mode", "tis_level", "tis_clip", "tis_clip_low")),
    "--use-rs": (lambda c: c.use_rs, ("rs_level", "rs_lower_bound", "rs_upper_bound")),
    "--use-opsm": (lambda c: c.use_opsm, ("opsm_delta",)),
    "--overlong-handling penalty": (
        lambda c: c.overlong_handling == "penalty",
        ("overlong_max_len", "overlong_buffer_len", "overlong_penalty_factor"),
    ),
    "--loss-agg-mode seq-mean-token-sum-norm": (lambda c: constant_length(c), ("loss_scale_factor",)),
    "--advantage-estimator grpo, gspo or cispo": (
        lambda c: is_spec(c.advantage_estimator) or c.advantage_estimator in ("grpo", "gspo", "cispo"),
        ("grpo_std_normalization",),
    ),
    "--credit-level turn or --advantage-estimator ppo": (
        lambda c: c.credit_level == "turn" or _has_critic(c),
        ("gamma",),
    ),
    "--advantage-estimator ppo": (lambda c: _has_critic(c), ("lambd", *_CRITIC)),
    "--loss-type sft_loss": (lambda c: c.is_supervised, ("train_data", "sft_from", "sft_min_reward", "eval_data")),
    "--dynamic-sampling-filter-path or --partial-rollout": (
        lambda c: c.dynamic_sampling_filter_path is not None or c.partial_rollout,
        ("over_sampling_batch_size",),
    ),
    "--partial-rollout": (lambda c: c.partial_rollout, ("mask_offpolicy_in_partial_rollout",)),
    "--replay-share": (lambda c: c.replay_share > 0, ("replay_buffer_size", "buffer_filter_path")),
    "--colocate": (lambda c: c.colocate, ("offload_train", "offload_rollout")),
    "--use-wandb": (lambda c: c.use_wandb, ("wandb_project",)),
    "--lr-decay-style linear, cosine, inverse-square-root or WSD": (
        lambda c: c.lr_decay_style != "constant",
        ("min_lr",),
    ),
    "--lr-decay-style WSD": (lambda c: c.lr_decay_style == "WSD", ("lr_wsd_decay_steps", "lr_wsd_decay_style")),
    "--start-weight-decay": (lambda c: c.start_weight_decay is not None, ("weight_decay_incr_style",)),
    "--eval-interval": (
        lambda c: c.eval_interval > 0,
        ("eval_prompt_data", "eval_env", "eval_own_split", "eval_before_train", "best_metric", "eval_data"),
    ),
}
"""What an option does nothing without -> whether it holds, and the options."""


def _without_effect(config: Config, given: Explicit) -> Iterator[str]:
    """Options given on purpose that would do nothing."""
    for needed, (holds, names) in _NEEDS.items():
        for name in names:
            if name in given and not holds(config):
                yield f"{given[name]} has no effect without {needed}."
    dotted = sorted(key for key in config.env_args if "." in key)
    if dotted and not config.eval_env and not config.eval_prompt_data:
        yield (
            f"--env-arg {dotted[0]}: arguments of --env have no name before them; those of an --eval-env or "
            "--eval-prompt-data do."
        )


def _engines(config: Config | EvalConfig, given: Explicit) -> Iterator[str]:
    engines, gpus, each = config.rollout_num_engines, config.rollout_num_gpus, config.rollout_num_gpus_per_engine
    if engines is not None and gpus is not None and engines * each != gpus:
        yield (
            f"--rollout-num-engines {engines} × --rollout-num-gpus-per-engine {each} = {engines * each}, but "
            f"--rollout-num-gpus is {gpus}."
        )
    if config.rollout_min_engines > (engines or 1):
        yield f"--rollout-min-engines {config.rollout_min_engines} is more than the {engines or 1} engines there are."
    if config.deterministic and isinstance(config, EvalConfig) and "threads" in given:
        yield f"{given['threads']} has no effect with --deterministic: each engine has one thread."


# -- agentrl eval --------------------------------------------------------------------------------------------


def checkpoint_problem(checkpoint: str) -> str | None:
    """What is wrong with ``--checkpoint``, in each command that takes it; None where nothing is."""
    if checkpoint in ("newest", "best") or checkpoint.isdecimal():
        return None
    return f"--checkpoint: expected newest, best or a number of rollouts, got {checkpoint!r}"


def _evaluated(config: EvalConfig, given: Explicit) -> Iterator[str]:
    """One model, and no option about tasks that are not there."""
    if config.base_url is not None:
        yield from _served(config, given)
    needs = {"--base-url": (config.base_url, ("model", "api_key_env")), "--run": (config.run, ("checkpoint",))}
    for needed, (value, names) in needs.items():
        for name in names if value is None else ():
            if name in given:
                yield f"{given[name]} has no effect without {needed}."
    if problem := checkpoint_problem(config.checkpoint):
        yield problem
    if config.task_id and "eval_tasks" in given:
        yield f"{given['eval_tasks']} and --task-id exclude each other: the tasks are those named."
    if len(config.env) > 1 and not config.eval_own_split:
        yield "--no-eval-own-split has no effect with several --env: each of them is a set."
    dotted = sorted(key for key in config.env_args if "." in key)
    plain = sorted(key for key in config.env_args if "." not in key)
    if len(config.env) > 1 and plain:
        yield (
            f"--env-arg {plain[0]} could be meant for any of {', '.join(config.env)}: write "
            f"--env-arg NAME.{plain[0]}=VALUE with the name of one of them."
        )
    if len(config.env) < 2 and dotted and not config.eval_env and not config.eval_prompt_data:
        yield f"--env-arg {dotted[0]}: there is one environment, so write the argument without a name before it."
    if config.run is not None and "hf_checkpoint" in given:
        yield (
            f"--run {config.run} and {given['hf_checkpoint']} {config.hf_checkpoint} exclude each other: the model "
            "is the run's newest checkpoint. To evaluate another model, leave --run out and name the environment."
        )
    if not config.env and config.prompt_data is None:
        if "split" in given and not config.eval_env:
            yield f"{given['split']} has no effect without --env or --prompt-data."
        if plain and "env_args" in given:
            yield (
                f"--env-arg {plain[0]} has no effect without --env or --prompt-data: for a set of --eval-prompt-data, "
                f"write --env-arg NAME.{plain[0]}=VALUE with its name."
            )


RESCORING = (
    *("rescore", "output_dir", "custom_rm_path", "sandbox"),
    *("rollout_concurrency", "episode_timeout", "json", "log_level"),
)
"""Options that count when stored episodes are scored anew; the rest is as it was when they were played."""


def _rescored(config: EvalConfig, given: Explicit) -> Iterator[str]:
    """What scoring anew needs, and what has no part in it."""
    if config.output_dir is None:
        yield "--rescore needs --output-dir: the folder of the evaluation whose episodes are scored anew."
    for name in given:
        if name not in RESCORING:
            yield f"{given[name]} has no effect with --rescore: environment and episodes are those of the folder."


def _served(config: EvalConfig, given: Explicit) -> Iterator[str]:
    """What a policy behind a server needs, and what is of engines only."""
    if not re.match(r"https?://[^/]", config.base_url or ""):
        yield f"--base-url: expected http://HOST:PORT/v1 or https://..., got {config.base_url!r}"
    engines = ("run", "hf_checkpoint", "rollout_num_engines", "rollout_num_gpus", "sglang", "deterministic")
    for name in (*engines, "chat_template", "chat_template_date"):
        if name in given:
            why = (
                "the policy is the server's, no engine starts"
                if name in engines
                else "the chat template is the server's"
            )
            yield f"--base-url and {given[name]} exclude each other: {why}."
