"""The second demonstration as a whole: a real model learns; held-out success by step, and what its size costs.

Runs ``agentrl train --config envs_examples/smollm2/guess.toml`` with SmolLM2, once a seed, and reads what the run
folders say; ``--runs`` reads finished ones instead::

    python benchmarks/demo_llm.py --seeds 0 1 2 --curve docs/images/smollm2.svg
    python benchmarks/demo_llm.py --runs runs/a runs/b --curve docs/images/smollm2.svg

Peak memory is the sum of the proportional set sizes (PSS) of the driver and all that descends from it, sampled every
two seconds. Targets: held-out success between 10 % and 50 % before, 20 points more after, in every seed, and engine
and trainer within 2e-5 nats. What belongs to the machine (seconds, tokens a second) is printed and has no target.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from curve import draw, points
from demo import SAMPLE_S, pss_bytes

from agentrl.processes.warden import descendants

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "envs_examples" / "smollm2" / "guess.toml"
LIMIT_S = 3600.0


def run_once(model: str, seed: int, run: Path, extra: list[str]) -> int:
    """One run; peak memory in bytes."""
    command = [sys.executable, "-m", "agentrl.cli.main", "train", "--config", str(CONFIG), "--hf-checkpoint", model,
               "--seed", str(seed), "--output-dir", str(run), *extra]  # fmt: skip
    log = run.with_suffix(".log")
    started, peak = time.monotonic(), 0
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            if time.monotonic() - started > LIMIT_S:
                process.terminate()
                process.wait(60)
                raise SystemExit(f"the run took more than {LIMIT_S:.0f} s; see {log}")
            peak = max(peak, sum(pss_bytes(p.pid) for p in descendants(process.pid)))
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"the run failed with exit code {process.returncode}:\n{log.read_text()[-3000:]}")
    return peak


def figures(run: Path) -> dict:
    """What ``metrics.jsonl`` of a run says; steps are rollouts trained on."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    median = {key: statistics.median(line[key] for line in trained)
              for key in ("time/step", "time/rollout", "time/train_steps", "train/tokens", "train/tokens_per_s",
                          "rollout/tokens_per_s", "sync/pause_seconds")}  # fmt: skip
    return {
        "run": str(run),
        **points(lines, "guess"),
        "sync_mb": trained[-1]["sync/bytes"] / 1e6,
        "logprob_abs_diff_mean": max(line["train/logprob_abs_diff_mean"] for line in trained),
        "median": median,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, nargs="+", help="finished runs to read, in place of new ones")
    parser.add_argument("--curve", type=Path, help="file for the picture (.svg, .png)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args, extra = parser.parse_known_args()
    results = []
    if args.runs:
        results = [figures(run) for run in args.runs]
    else:
        from agentrl.demo.smollm2 import fetch

        model = str(fetch())
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            for seed in args.seeds:
                run, began = Path(folder) / f"seed-{seed}", time.monotonic()
                peak = run_once(model, seed, run, extra)
                results.append({**figures(run), "peak_pss_gb": peak / 1e9, "seconds": time.monotonic() - began})
    for result in results:
        print(json.dumps(result), flush=True)
    first, last = ([result["held_out"][i][1] for result in results] for i in (0, -1))
    diff = max(result["logprob_abs_diff_mean"] for result in results)
    print(
        f"SmolLM2, {len(results)} seeds: held-out success {statistics.fmean(first):.1%} -> {statistics.fmean(last):.1%}"
        f" ({', '.join(f'{a:.0%} -> {b:.0%}' for a, b in zip(first, last, strict=True))}); "
        f"sync of {results[-1]['sync_mb']:.0f} MB in {results[-1]['median']['sync/pause_seconds']:.2f} s; "
        f"log-probability difference at most {diff:.1e}"
    )
    if args.curve:
        draw(results, args.curve, episodes=64)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    learned = all(0.1 <= a <= 0.5 and b >= a + 0.2 for a, b in zip(first, last, strict=True))
    return 0 if learned and diff < 2e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
