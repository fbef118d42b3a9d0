"""``agentrl serve``."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.cli.extras import ENGINES, require
from agentrl.config.layers import load_options
from agentrl.config.schema import ServeOptions
from agentrl.config.template import template_problems
from agentrl.config.validate import checkpoint_problem
from agentrl.errors import ConfigError

Options = ServeOptions


def run(argv: Sequence[str]) -> int:
    """Serve until interrupted; returns the exit code."""
    options = load_options(ServeOptions, argv)
    if options.run is not None and options.hf_checkpoint is not None:
        raise ConfigError("--run and --hf-checkpoint both name a model: give one of them.")
    if options.run is None and options.checkpoint != "newest":
        raise ConfigError(f"--checkpoint {options.checkpoint} is one of a training run: name the run with --run.")
    problems = [checkpoint_problem(options.checkpoint), *template_problems(options)]
    if any(problems):
        raise ConfigError("\n".join(filter(None, problems)))
    require("serve", ENGINES)
    from agentrl.serving.run import serve

    serve(options)
    return 0
