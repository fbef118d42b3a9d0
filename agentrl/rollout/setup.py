"""From a configuration to what a rollout needs: sampling, limits, engines. One place for both commands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.template import template_date, template_source, template_variables
from agentrl.engines.engine import EngineSpec
from agentrl.engines.world import World
from agentrl.errors import ConfigError
from agentrl.processes.warden import Warden
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.types import SamplingParams

if TYPE_CHECKING:
    from agentrl.rollout.template.chat import ChatTemplate

CONTEXT_MARGIN = 64


@contextlib.contextmanager
def scratch(warden: Warden) -> Iterator[str]:
    """One temporary folder for all that this process and its children put into temporary folders.

    Ray, torch and SGLang each leave something behind in the machine's; here it goes with the run, however
    the run ends.
    """
    folder = tempfile.mkdtemp(prefix="agentrl-")
    warden.add_temp_dir(folder)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    try:
        yield folder
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


def make_env(
    spec: str, kwargs: dict[str, Any], *, tool_timeout: float | None = None, sandbox: str | None = None
) -> Any:
    """The environment that ``spec`` names, with what the command line says about it.

    Raises:
        ConfigError: ``--tool-timeout`` for an environment that has no tools.
    """
    from agentrl.envs.registry import make

    env = make(spec, **kwargs)
    if tool_timeout is not None:
        if not hasattr(env.unwrapped, "tool_timeout"):
            raise ConfigError(f"--tool-timeout {tool_timeout:g}: {spec!r} is no ToolEnv, so it has no such limit")
        env.unwrapped.tool_timeout = tool_timeout
    if sandbox is not None and hasattr(env.unwrapped, "sandbox"):
        env.unwrapped.sandbox = sandbox
    return env


def open_chat(cfg: Any, model_dir: str) -> ChatTemplate:
    """The model's tokenizer and chat template, as the options of the template say.

    Raises:
        ConfigError: there is no tokenizer.
    """
    from agentrl.rollout.template.chat import ChatTemplate

    return ChatTemplate(
        model_dir, chat_template=template_source(cfg), variables=template_variables(cfg), date=template_date(cfg)
    )


def template_notes(
    cfg: Any, chat: ChatTemplate, environments: Iterable[tuple[str, dict[str, Any]]], *, training: bool
) -> list[str]:
    """What a person should know of the chat template with these environments, see :func:`check_template`.

    A custom generate function decides itself what it sends and how it reads the answer: nothing is tried out for it.

    Args:
        environments: Name and arguments of each.

    Raises:
        ConfigError: one of them has tools, and calls cannot be read as the template writes them.
    """
    from agentrl.rollout.template.check import check_template

    if cfg.custom_generate_function_path is not None:
        return []
    tools = False
    for spec, kwargs in environments:
        env = make_env(spec, kwargs, sandbox=cfg.sandbox)
        asks = getattr(env.unwrapped, "follows_template", None)
        tools = tools or (asks is not None and asks())
        env.close()
    return check_template(chat, tools=tools, training=training)


def rollout_params(cfg: Any) -> SamplingParams:
    """Sampling of training episodes."""
    return SamplingParams(
        temperature=cfg.rollout_temperature,
        top_p=cfg.rollout_top_p,
        max_new_tokens=cfg.rollout_max_response_len,
        stop=cfg.rollout_stop,
        seed=cfg.seed if cfg.deterministic else None,
    )


def eval_params(cfg: Any) -> SamplingParams:
    """Sampling of held-out episodes: greedy unless ``--eval-temperature`` says otherwise."""
    return SamplingParams(
        temperature=cfg.eval_temperature,
        top_p=cfg.eval_top_p,
        top_k=cfg.eval_top_k,
        max_new_tokens=cfg.held_out.rollout_max_response_len,
        stop=cfg.eval_stop or getattr(cfg, "rollout_stop", ()),
        seed=cfg.seed if cfg.deterministic else None,
    )


def episode_limits(cfg: Any) -> EpisodeLimits:
    """Budgets of an episode of training; of a held-out one with ``cfg.held_out``."""
    return EpisodeLimits(
        max_turns=cfg.max_turns,
        max_response_len=cfg.rollout_max_response_len,
        max_context_len=cfg.rollout_max_context_len,
        max_tool_output_tokens=cfg.max_tool_output_tokens,
        timeout_s=cfg.episode_timeout,
        step_timeout_s=cfg.episode_step_timeout,
        request_timeout_s=cfg.engine_timeout,
    )


def engine_spec(cfg: Any, model_dir: str, world: World, *, mem_fraction: float | None = None) -> EngineSpec:
    """What each engine of a run serves, and on what.

    Args:
        mem_fraction: share of a GPU's memory that it takes; None: SGLang's choice.

    Raises:
        ConfigError: ``--deterministic`` in a precision for which the CPU cannot offer it.
    """
    gpu = world.has_gpu
    if cfg.deterministic and not gpu and cfg.dtype == "bf16":
        raise ConfigError("--deterministic on the CPU computes in fp32: leave --dtype bf16 out.")
    dtype = {"bf16": "bfloat16", "fp32": "float32", "auto": None}[cfg.dtype]
    cpu_tokens = max(2, min(cfg.rollout_concurrency, 128)) * cfg.longest_context
    extra = dict(cfg.sglang)
    return EngineSpec(
        model_path=model_dir,
        device=world.device,
        dtype=dtype,
        tp=world.engine_ranks(cfg),
        mem_fraction=mem_fraction,
        max_total_tokens=None if gpu else min(cpu_tokens, 131072),
        context_length=_context_length(cfg, model_dir),
        threads=1 if cfg.deterministic else cfg.threads or engine_threads(cfg),
        seed=cfg.seed,
        deterministic=cfg.deterministic,
        extra=extra,
    )


def _context_length(cfg: Any, model_dir: str) -> int:
    """What the engine is told. SGLang keeps a few tokens of it for itself, so it gets more than an episode uses."""
    wanted = cfg.longest_context + CONTEXT_MARGIN
    config = json.loads((Path(model_dir) / "config.json").read_text())
    trained = config.get("max_position_embeddings")
    return wanted if trained is None else max(min(wanted, trained), cfg.longest_context)


def engine_threads(cfg: Any) -> int:
    """Cores divided among engines. Trainer and engines take turns, so each side may use them all."""
    return max(1, (os.cpu_count() or 1) // max(cfg.rollout_num_engines or 1, 1))
