"""The demo as a whole: held-out success before and after, time, first episode, memory.

Runs ``agentrl train --env search`` with the embedded defaults, once a seed, and reads what the run folder says::

    python benchmarks/demo.py --seeds 0 1 2

Peak memory is the sum of the proportional set sizes (PSS: shared pages counted once) of the driver and all that
descends from it, sampled every two seconds. The time to 90 % ends when the run writes down the first evaluation of at
least that. Targets, the times on two quiet cores: at most 50 % before, at least 90 % after, evaluated within
75 s of the command, first episode within 10 s, under 8 GB, engine and trainer within 1e-5 in log-probability. The
CPU time of all processes, sampled as well, changes less than times do where a machine has other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from curve import draw, points

from agentrl.processes.tree import descendants

SAMPLE_S = 2.0
POLL_S = 0.1
REACHED = 0.9
LIMIT_S = 1800.0


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken; 0 when it is gone."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def run_once(seed: int, folder: Path, extra: list[str]) -> dict[str, float]:
    """One demo; the figures of it."""
    run = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "agentrl.cli.main", "train", "--env", "search", "--seed", str(seed),
               "--output-dir", str(run), *extra]  # fmt: skip
    log = folder / f"seed-{seed}.log"
    started, clock = time.monotonic(), time.time()
    peak, next_sample, first_episode, cpu = 0, 0.0, float("nan"), {}
    # As where it is installed: modules are compiled once, not by each process anew.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        while process.poll() is None:
            passed = time.monotonic() - started
            if passed > LIMIT_S:
                process.terminate()
                process.wait(60)
                raise SystemExit(f"the demo took more than {LIMIT_S:.0f} s; see {log}")
            if passed >= next_sample:
                tree = descendants(process.pid)
                peak = max(peak, sum(pss_bytes(p.pid) for p in tree))
                cpu.update((p.pid, seconds) for p in tree if (seconds := cpu_seconds(p.pid)))
                next_sample = passed + SAMPLE_S
            if first_episode != first_episode and b"the first episode" in log.read_bytes():
                first_episode = passed
            time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(f"the demo failed with exit code {process.returncode}:\n{log.read_text()[-3000:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    success = [line["eval/search/success"] for line in lines if "eval/search/success" in line]
    mismatch = [line["train/logprob_abs_diff_mean"] for line in lines if "train/logprob_abs_diff_mean" in line]
    return {
        "seed": seed,
        "before": success[0],
        "after": success[-1],
        "seconds": time.monotonic() - started,
        "reached_90_s": min(
            (line["time"] - clock for line in lines if line.get("eval/search/success", 0) >= REACHED),
            default=float("nan"),
        ),
        "first_episode_s": first_episode,
        "cpu_seconds": sum(cpu.values()),
        "peak_pss_gb": peak / 1e9,
        "logprob_abs_diff_mean": max(mismatch),
        **points(lines, "search"),
        "tokens_per_s": statistics.median(line["rollout/tokens_per_s"] for line in lines if "rollout/reward" in line),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--curve", type=Path, help="file for the picture (.svg, .png)")
    args, extra = parser.parse_known_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        for seed in args.seeds:
            results.append(run_once(seed, Path(folder), extra))
            print(json.dumps(results[-1]), flush=True)
    numbers = [key for key, value in results[0].items() if isinstance(value, float)]
    mean = {key: statistics.fmean(result[key] for result in results) for key in numbers}
    print(
        f"demo, mean of {len(results)} seeds: held-out success {mean['before']:.1%} -> {mean['after']:.1%} "
        f"in {mean['seconds']:.0f} s; {REACHED:.0%} evaluated after {mean['reached_90_s']:.0f} s; "
        f"first episode after {mean['first_episode_s']:.1f} s; {mean['cpu_seconds']:.0f} s of CPU; "
        f"peak memory {max(r['peak_pss_gb'] for r in results):.2f} GB (PSS); "
        f"log-probability difference at most {max(r['logprob_abs_diff_mean'] for r in results):.1e}"
    )
    if args.curve:
        draw(results, args.curve, episodes=128)
    if args.json:
        Path(args.json).write_text(json.dumps({"runs": results, "mean": mean}, indent=2) + "\n")
    reached = (
        mean["before"] <= 0.5
        and mean["after"] >= 0.9
        and mean["reached_90_s"] <= 75
        and mean["first_episode_s"] <= 10
        and max(r["peak_pss_gb"] for r in results) < 8
        and max(r["logprob_abs_diff_mean"] for r in results) < 1e-5
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
