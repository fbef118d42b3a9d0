"""``agentrl serve``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.cli.extras import ENGINES, require
from agentrl.config.layers import load_options
from agentrl.config.options import Count, PathText, Positive, Range, Seconds
from agentrl.config.schema import PassedOn, TemplateOptions
from agentrl.config.template import template_problems
from agentrl.errors import ConfigError

INTRO = """\
Serve a model at an OpenAI-compatible address, until Ctrl-C.

  agentrl serve --hf-checkpoint MODEL
  agentrl serve --run runs/NAME --checkpoint best         a checkpoint of a training run

Clients need a key. Put one into the environment variable AGENTRL_API_KEY; else one is made, and shown once on
the terminal. When the server takes requests, the last line printed is: ready base_url=URL model=NAME"""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PassedOn, TemplateOptions):
    """Serving"""

    hf_checkpoint: PathText | None = None
    """Folder of the model in Hugging Face form. Without it and without --run: the embedded demo model."""
    run: PathText | None = None
    """Training run of which a checkpoint is served, in place of --hf-checkpoint."""
    checkpoint: str = "newest"
    """Checkpoint of --run: `newest`, `best` (see --best-metric of training), or its number of rollouts."""
    served_model_name: str | None = None
    """Name that clients ask for; unset: the folder's name, or `RUN@STEP`."""
    host: str = "127.0.0.1"
    """Address to listen on. Other than loopback only in a network you trust: traffic is not encrypted."""
    port: Annotated[int, Range(low=0, high=65535)] = 8000
    """Port; 0 takes a free one, which is printed."""
    api_key: bool = True
    """Ask clients for a key. --no-api-key is taken on loopback only."""
    tool_call_parser: str = "auto"
    """SGLang's parser of tool calls, which turns them into `tool_calls`; `auto` takes the one of the chat template,
    `none` leaves calls in the text."""
    reasoning_parser: str = "auto"
    """SGLang's parser of reasoning, which turns it into `reasoning_content`; `auto` takes the one of the chat
    template, `none` leaves it in the text."""
    context_length: Positive | None = None
    """Most tokens of prompt and answer together; unset: what the model was made for."""
    rollout_num_engines: Positive = 1
    """Number of SGLang engines behind the address."""
    rollout_num_gpus_per_engine: Positive = 1
    """GPUs of one engine (its tensor-parallel size)."""
    router_policy: Literal["cache_aware", "round_robin", "random"] = "cache_aware"
    """How the router chooses an engine; `cache_aware` sends a conversation where its beginning is cached."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision; `auto` is fp32 on the CPU and bf16 on GPUs."""
    threads: Positive | None = None
    """CPU threads of each engine; unset: the cores divided among them."""
    engine_timeout: Seconds = 600.0
    """Longest wait in seconds for an engine to start."""
    seed: Count = 0
    """Seed of sampling."""
    log_dir: PathText | None = None
    """Folder for the logs of engines and router; unset: they are gone with the server."""


def usage(argv: Sequence[str]) -> str:
    """Help text."""
    from agentrl.config.help import command_help

    return command_help("serve [--hf-checkpoint DIR | --run RUN] [OPTIONS]", INTRO, ServeOptions)


def run(argv: Sequence[str]) -> int:
    """Serve until interrupted; returns the exit code."""
    options = load_options(ServeOptions, argv)
    if options.run is not None and options.hf_checkpoint is not None:
        raise ConfigError("--run and --hf-checkpoint both name a model: give one of them.")
    if options.run is None and options.checkpoint != "newest":
        raise ConfigError(f"--checkpoint {options.checkpoint} is one of a training run: name the run with --run.")
    if options.checkpoint not in ("newest", "best") and not options.checkpoint.isdecimal():
        raise ConfigError(f"--checkpoint: expected newest, best or a number of rollouts, got {options.checkpoint!r}")
    problems = list(template_problems(options))
    if problems:
        raise ConfigError("\n".join(problems))
    require("serve", ENGINES)
    from agentrl.serving.run import serve

    serve(options)
    return 0
