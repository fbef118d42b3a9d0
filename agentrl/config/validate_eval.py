"""Rules of ``agentrl eval`` alone: one policy, and no option about what is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from agentrl.config.schema import EvalConfig


def evaluated(config: EvalConfig, explicit: Mapping[str, str]) -> Iterator[str]:
    """One model, and no option about tasks that are not there."""
    if config.base_url is None:
        for name in ("model", "api_key_env"):
            if name in explicit:
                yield f"{explicit[name]} has no effect without --base-url."
    else:
        yield from _served(config, explicit)
    if config.run is None and "checkpoint" in explicit:
        yield f"{explicit['checkpoint']} has no effect without --run."
    if config.checkpoint not in ("newest", "best") and not config.checkpoint.isdecimal():
        yield f"--checkpoint: expected newest, best or a number of rollouts, got {config.checkpoint!r}"
    if config.task_id and "eval_tasks" in explicit:
        yield f"{explicit['eval_tasks']} and --task-id exclude each other: the tasks are those named."
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
    if config.run is not None and "hf_checkpoint" in explicit:
        yield (
            f"--run {config.run} and {explicit['hf_checkpoint']} {config.hf_checkpoint} exclude each other: the model "
            "is the run's newest checkpoint. To evaluate another model, leave --run out and name the environment."
        )
    if not config.env and config.prompt_data is None:
        if "split" in explicit and not config.eval_env:
            yield f"{explicit['split']} has no effect without --env or --prompt-data."
        if plain and "env_args" in explicit:
            yield (
                f"--env-arg {plain[0]} has no effect without --env or --prompt-data: for a set of --eval-prompt-data, "
                f"write --env-arg NAME.{plain[0]}=VALUE with its name."
            )


RESCORING = (
    *("rescore", "output_dir", "custom_rm_path", "sandbox"),
    *("rollout_concurrency", "episode_timeout", "json", "log_level"),
)
"""Options that count when stored episodes are scored anew; the rest is as it was when they were played."""


def rescored(config: EvalConfig, explicit: Mapping[str, str]) -> Iterator[str]:
    """What scoring anew needs, and what has no part in it."""
    if config.output_dir is None:
        yield "--rescore needs --output-dir: the folder of the evaluation whose episodes are scored anew."
    for name in explicit:
        if name not in RESCORING:
            yield f"{explicit[name]} has no effect with --rescore: environment and episodes are those of the folder."


def _served(config: EvalConfig, explicit: Mapping[str, str]) -> Iterator[str]:
    """What a policy behind a server needs, and what is of engines only."""
    if not re.match(r"https?://[^/]", config.base_url or ""):
        yield f"--base-url: expected http://HOST:PORT/v1 or https://..., got {config.base_url!r}"
    for name in ("run", "hf_checkpoint", "rollout_num_engines", "rollout_num_gpus", "sglang", "deterministic"):
        if name in explicit:
            yield f"--base-url and {explicit[name]} exclude each other: the policy is the server's, no engine starts."
    for name in ("chat_template", "chat_template_date"):
        if name in explicit:
            yield f"--base-url and {explicit[name]} exclude each other: the chat template is the server's."
