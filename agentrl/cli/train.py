"""``agentrl train``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl.cli.extras import TRAINING, require
from agentrl.config import Config
from agentrl.config.layers import resolve
from agentrl.errors import LostError
from agentrl.processes.signals import printable
from agentrl.processes.supervisor import Attempt, supervise

Options = Config


def run(argv: Sequence[str]) -> int:
    """Train; returns the exit code. The configuration is complete and checked before anything heavy is imported."""
    attempt = Attempt.of_environment()
    resolved = resolve(Config, argv)
    for note in resolved.notes if attempt is None else ():
        print(f"note: {note}", file=sys.stderr)
    require("train", TRAINING)
    if resolved.config.dry_run:
        from agentrl.orchestrator.dry_run import dry_run

        dry_run(resolved.config)
        return 0
    if resolved.config.auto_resume and attempt is None:
        return through_faults(argv, resolved.config.auto_resume_max)
    from agentrl.orchestrator.launch import train

    if attempt is None:
        return train(resolved.config) or 0
    try:
        return train(resolved.config, attempt)
    except LostError as error:
        attempt.tell(error=str(error))
        return error.exit_code
    finally:
        attempt.tell(open=False)


def through_faults(argv: Sequence[str], limit: int) -> int:
    """Train in a process of its own, which is started again after faults; returns the exit code."""
    program = [sys.executable, "-m", "agentrl.cli.main", "train"]
    began = time.monotonic()

    def saved(run: str) -> int:
        from agentrl.data.checkpoint import CheckpointStore

        return CheckpointStore.of_run(Path(run)).newest_step() or 0

    def say(line: str) -> None:
        seconds = int(time.monotonic() - began)
        print(f"[{seconds // 60}:{seconds % 60:02d}] {printable(line)}", flush=True)

    return supervise(
        [*program, *argv], lambda load: [*program, "--load", load], progress=saved, limit=limit, say=say
    )  # the run's options are in its folder
