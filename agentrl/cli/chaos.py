"""``agentrl chaos``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from agentrl.cli.extras import TRAINING, require
from agentrl.config.layers import load_options
from agentrl.config.options import Count, PathText, Positive, Range
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Faults"""

    minutes: Annotated[float, Range(low=0.0, low_open=True)] = 10.0
    """Minutes in which faults happen; the training at hand then comes to its end without."""
    seed: Count = 0
    """Seed of the faults and of the trainings."""
    kills: Positive | None = None
    """No more faults after so many kills."""
    output_dir: PathText = "chaos"
    """New folder for the runs, what each of them said, and the faults (`faults.jsonl`)."""


def run(argv: Sequence[str]) -> int:
    """Break and audit; returns the exit code."""
    options = load_options(Options, argv)
    require("chaos", TRAINING)
    folder = Path(options.output_dir).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--output-dir {options.output_dir} is not empty. Choose another folder.")
    from agentrl.orchestrator.chaos import chaos, report

    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {line}", flush=True)

    verdict = chaos(folder, minutes=options.minutes, seed=options.seed, kills=options.kills, say=say)
    print(report(verdict))
    return 1 if verdict.problems else 0
