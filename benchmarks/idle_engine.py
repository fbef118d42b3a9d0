"""What one CPU engine costs while it does nothing, and how soon it is there.

CPU of the whole process tree (server, scheduler, detokenizer) over a quiet while, proportional memory (PSS) of each
process, and the time from starting to the first healthy answer. The pool's health check runs beside it.

    python benchmarks/idle_engine.py [--seconds 30] [--model DIR]

Prints one JSON object and one line; exits 1 when the engine uses 2 % of a core or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from agentrl.engines.control import EngineControl
from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.processes.tree import Process

LIMIT = 0.02
HEALTH_INTERVAL_S = 15.0
DEMO_MODEL = Path(__file__).resolve().parents[1] / "agentrl/assets/demo"


def cpu_seconds(tree: list[Process]) -> dict[int, float]:
    """User and system time of each process."""
    spent = {}
    for proc in tree:
        fields = Path(f"/proc/{proc.pid}/stat").read_text().rpartition(")")[2].split()
        spent[proc.pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def pss_mib(pid: int) -> float:
    """Proportional set size: shared pages count as a share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def check_health(engine: EngineProcess, seconds: float) -> None:
    """What the pool does to an idle engine."""
    control = EngineControl(engine.url, engine.api_key)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(HEALTH_INTERVAL_S, left))
        await control.can_generate()
    await control.close()


def measure(model: Path, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as logs:
        engine = EngineProcess(EngineSpec(str(model)), log_dir=logs)
        began = time.monotonic()
        engine.start(300)
        try:
            started = time.monotonic() - began
            time.sleep(3)
            tree = engine.tree()
            before, began = cpu_seconds(tree), time.monotonic()
            asyncio.run(check_health(engine, seconds))
            spent = time.monotonic() - began
            after = cpu_seconds(tree)
            cpu = [(after[pid] - before[pid]) / spent for pid in after]
            pss = [pss_mib(proc.pid) for proc in tree]
        finally:
            engine.stop()
    return {
        "cpu": sum(cpu),
        "cpu_by_process": cpu,
        "pss_mib": sum(pss),
        "pss_mib_by_process": pss,
        "start_s": started,
        "limit": LIMIT,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    options = parser.parse_args()
    result = measure(options.model, options.seconds)
    print(json.dumps({"benchmark": "idle_engine", **result}))
    print(
        f"idle engine: {100 * result['cpu']:.2f} % of a core, {result['pss_mib']:.0f} MiB (PSS), "
        f"healthy after {result['start_s']:.1f} s; target under {100 * LIMIT:.0f} %"
    )
    return int(result["cpu"] >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
