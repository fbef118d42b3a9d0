"""``agentrl export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.layers import load_options
from agentrl.config.options import PathText
from agentrl.config.schema import RunCheckpoint
from agentrl.config.validate import checkpoint_problem
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options(RunCheckpoint):
    """Export"""

    output_dir: PathText | None = None
    """Folder to write; it must not hold anything yet."""


def run(argv: Sequence[str]) -> int:
    """Export; returns the exit code."""
    given = load_options(Options, argv)
    if given.run is None or given.output_dir is None:
        raise ConfigError("agentrl export needs --run RUN and --output-dir DIR.")
    if problem := checkpoint_problem(given.checkpoint):
        raise ConfigError(problem)
    from agentrl.data.export import export

    export(given.run, given.output_dir, checkpoint=given.checkpoint)
    print(f"wrote {given.output_dir}")
    return 0
