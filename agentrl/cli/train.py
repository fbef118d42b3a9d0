"""``agentrl train``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.cli.extras import TRAINING, require
from agentrl.config import Config
from agentrl.config.layers import resolve

INTRO = """\
Train an agent: roll out episodes, turn their rewards into advantages, train, sync the weights, repeat.

  agentrl train --env search                                  the embedded model, ready to run
  agentrl train --env my_env.py:MyEnv --hf-checkpoint MODEL   your environment, your model
  agentrl train --prompt-data tasks.jsonl --rm-type math      single-turn tasks from a file
  agentrl train --loss-type sft_loss --train-data chats.jsonl  supervised: learn written conversations
  agentrl train --load runs/NAME                              go on where a run stopped

With --dry-run everything is checked and printed as it would be, and nothing is started."""


SYNOPSIS, OPTIONS = "train --env NAME [OPTIONS]", Config


def run(argv: Sequence[str]) -> int:
    """Train; returns the exit code. The configuration is complete and checked before anything heavy is imported."""
    resolved = resolve(Config, argv)
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    require("train", TRAINING)
    if resolved.config.dry_run:
        from agentrl.orchestrator.dry_run import dry_run

        dry_run(resolved.config)
        return 0
    from agentrl.orchestrator.launch import train

    return train(resolved.config) or 0
