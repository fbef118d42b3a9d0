"""``agentrl export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.layers import load_options
from agentrl.config.options import PathText
from agentrl.errors import ConfigError

INTRO = """\
Write a checkpoint of a training run as a Hugging Face model: weights, configuration, tokenizer, chat template.

  agentrl export --run runs/NAME --output-dir my-model"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Export"""

    run: PathText | None = None
    """Training run whose checkpoint is exported."""
    output_dir: PathText | None = None
    """Folder to write; it must not hold anything yet."""
    checkpoint: str = "newest"
    """Checkpoint to take: `newest`, `best` (see --best-metric of training), or its number of rollouts."""


def usage(argv: Sequence[str]) -> str:
    """Help text."""
    from agentrl.config.help import command_help

    return command_help("export --run RUN --output-dir DIR", INTRO, ExportOptions)


def run(argv: Sequence[str]) -> int:
    """Export; returns the exit code."""
    given = load_options(ExportOptions, argv)
    if given.run is None or given.output_dir is None:
        raise ConfigError("agentrl export needs --run RUN and --output-dir DIR.")
    if given.checkpoint not in ("newest", "best") and not given.checkpoint.isdecimal():
        raise ConfigError(f"--checkpoint: expected newest, best or a number of rollouts, got {given.checkpoint!r}")
    from agentrl.trainer.export import export

    export(given.run, given.output_dir, checkpoint=given.checkpoint)
    print(f"wrote {given.output_dir}")
    return 0
