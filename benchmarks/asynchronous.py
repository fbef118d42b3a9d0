"""Asynchronous training against taking turns, on the real stack, where tools take as long as services do.

The demo with a search tool that answers after a log-normal time (median 0.5 s, one in a hundred about 5 s), trained
with ``--async-buffer-size 0`` and with a buffer, alternating::

    python benchmarks/asynchronous.py --repeats 2

Prints the steps an hour of each (from the second step on), their ratio, how old trained tokens were, the share of the
time that the trainer waited, the share in which no request was in flight (with a buffer; without one, of rollouts),
and the success of the last training step. Target: ratio at least 1.8, success alike. ``--idle``: only the run with a
buffer, with few episodes at once (``--concurrency``), so that the trainer waits for them; of the steps after the first
and before the last, towards which no more episodes begin: no request may be in flight for at most 10 % of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.envs.builtin.search import SearchEnv

MEDIAN_S, SPREAD, LONGEST_S = 0.5, 1.0, 5.0
LIMIT_S, IDLE = 900.0, 0.1


class SlowSearch(SearchEnv):
    """The search environment behind a slow service."""

    async def astep(self, action: str) -> Any:
        if not hasattr(self, "_latency"):
            self._latency = random.Random(0)
        if getattr(action, "calls", None):
            await asyncio.sleep(min(LONGEST_S, self._latency.lognormvariate(math.log(MEDIAN_S), SPREAD)))
        return await super().astep(action)


def run_once(ahead: int, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """One run; its figures."""
    command = [
        *(sys.executable, "-m", "agentrl.cli.main", "train", "--env", f"{Path(__file__).resolve()}:SlowSearch"),
        *("--num-rollout", str(args.steps), "--rollout-batch-size", str(args.tasks), "--save-interval", "0"),
        *("--rollout-concurrency", str(args.concurrency), "--tool-timeout", "30", "--async-buffer-size", str(ahead)),
        *("--eval-interval", "0", "--max-turns", "4", "--output-dir", str(folder)),
    ]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S).returncode
    if code:
        raise SystemExit(f"the run failed with exit code {code}:\n{log.read_text()[-3000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line][1 : -ahead if args.idle else None]
    seconds = [line["time/step"] for line in steps]
    return {
        "steps_per_hour": 3600 * len(steps) / sum(seconds),
        "waited": sum(line["time/rollout_wait"] for line in steps) / sum(seconds),
        "engine_idle": sum(line["engine/idle"] * line["time/step"] for line in steps) / sum(seconds),
        "staleness_max": max(line["rollout/staleness_max"] for line in steps),
        "age_mean": statistics.fmean(line["train/age_mean"] for line in steps),
        "success": statistics.fmean(line["rollout/success"] for line in steps[-2:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a rollout")
    parser.add_argument("--buffer", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=1024, help="episodes in play at once")
    parser.add_argument("--idle", action="store_true", help="only how long no request is in flight")
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as temporary:
        if args.idle:
            result = run_once(args.buffer, Path(temporary) / "idle", args)
            print(f"buffer {args.buffer}: {json.dumps({key: round(value, 3) for key, value in result.items()})}")
            return 0 if result["engine_idle"] <= IDLE else 1
        for repeat in range(args.repeats):
            turns, ahead = (run_once(n, Path(temporary) / f"{repeat}-{n}", args) for n in (0, args.buffer))
            ratios.append(ahead["steps_per_hour"] / turns["steps_per_hour"])
            for name, result in (("taking turns", turns), (f"buffer {args.buffer}", ahead)):
                print(f"{name}: {json.dumps({key: round(value, 3) for key, value in result.items()})}", flush=True)
    print(f"steps an hour, buffer {args.buffer} ÷ taking turns: {statistics.median(ratios):.2f} {ratios}")
    return 0 if statistics.median(ratios) >= 1.8 else 1


if __name__ == "__main__":
    sys.exit(main())
