"""``agentrl eval``."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.cli.extras import ENGINES, require
from agentrl.config import EvalConfig, load_eval_config

Options = EvalConfig


def run(argv: Sequence[str]) -> int:
    """Evaluate; returns the exit code."""
    config = load_eval_config(argv)
    if config.base_url is None and not config.rescore:
        require("eval", ENGINES)
    from agentrl.evaluation.run import evaluate

    return evaluate(config)
