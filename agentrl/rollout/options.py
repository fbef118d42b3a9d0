"""From the options of a run to what its episodes need: template, sampling, limits. One place for both commands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import Config, EvalConfig
from agentrl.config.template import template_date, template_source, template_variables
from agentrl.envs.registry import make_env
from agentrl.envs.tool_env import check_machine, prepare_tools
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.types import SamplingParams

if TYPE_CHECKING:
    from agentrl.rollout.template.chat import ChatTemplate


def open_chat(cfg: Config | EvalConfig, model_dir: str) -> ChatTemplate:
    """The model's tokenizer and chat template, as the options of the template say.
    Raises ConfigError: there is no tokenizer."""
    from agentrl.rollout.template.chat import ChatTemplate

    return ChatTemplate(
        model_dir, chat_template=template_source(cfg), variables=template_variables(cfg), date=template_date(cfg)
    )


def prepare_environments(cfg: Config | EvalConfig, environments: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Have what the first calls of the tools of these environments (name and arguments of each) would wait for, in the
    process that plays them. Raises ConfigError: this machine lacks what a tool needs."""
    several = list(environments)
    for number, (spec, kwargs) in enumerate(several):
        if (spec, kwargs) in several[:number]:
            continue
        env = make_env(spec, kwargs, sandbox=cfg.sandbox)
        try:
            check_machine(env)  # here, for what the first check takes would hold up the episodes
            prepare_tools(env)
        finally:
            env.close()


def template_notes(
    cfg: Config | EvalConfig, chat: ChatTemplate, environments: Iterable[tuple[str, dict[str, Any]]], *, training: bool
) -> list[str]:
    """What a person should know of the chat template with these environments, see :func:`check_template`, which says
    what it raises. A custom generate function decides itself what it sends and how it reads the answer: nothing is
    tried out for it."""
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


def rollout_params(cfg: Config) -> SamplingParams:
    """Sampling of training episodes."""
    return SamplingParams(
        temperature=cfg.rollout_temperature,
        top_p=cfg.rollout_top_p,
        max_new_tokens=cfg.rollout_max_response_len,
        stop=cfg.rollout_stop,
        seed=cfg.seed if cfg.deterministic else None,
    )


def eval_params(cfg: Config | EvalConfig) -> SamplingParams:
    """Sampling of held-out episodes: greedy unless ``--eval-temperature`` says otherwise."""
    return SamplingParams(
        temperature=cfg.eval_temperature,
        top_p=cfg.eval_top_p,
        top_k=cfg.eval_top_k,
        max_new_tokens=cfg.held_out.rollout_max_response_len,
        stop=cfg.eval_stop or getattr(cfg, "rollout_stop", ()),
        seed=cfg.seed if cfg.deterministic else None,
    )


def episode_limits(cfg: Config | EvalConfig) -> EpisodeLimits:
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
