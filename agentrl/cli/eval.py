"""``agentrl eval``."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.cli.extras import ENGINES, require
from agentrl.config import EvalConfig, load_eval_config

INTRO = """\
Evaluate an agent on held-out tasks, greedily unless told otherwise.

  agentrl eval --env search --hf-checkpoint MODEL --limit 100
  agentrl eval --run runs/NAME                                a training run's newest checkpoint
  agentrl eval --env search --base-url http://HOST:PORT/v1    any OpenAI-compatible server

The same command with the same --output-dir goes on where it stopped. Exit code 0: every episode was played and
scored; 1: not all were, the rest is left to a rerun; 2: a wrong flag."""


SYNOPSIS, OPTIONS = "eval --env NAME [OPTIONS]", EvalConfig


def run(argv: Sequence[str]) -> int:
    """Evaluate; returns the exit code."""
    config = load_eval_config(argv)
    if config.base_url is None and not config.rescore:
        require("eval", ENGINES)
    from agentrl.evaluation.run import evaluate

    return evaluate(config)
