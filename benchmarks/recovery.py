"""What an engine's ``kill -9`` costs: until its requests go on elsewhere, and until a new engine takes requests again.

The pool, router, client and engines of a run, with the demo model at a published version of its weights. Requests of
several episodes are in flight all the time. Then the scheduler or the server of one engine is killed, in turn. The
clock runs until the last request that was in flight then has its answer, and until the pool has another engine at the
published version in the router. The second is compared with bare starts of an engine of the same kind, one before each
kill and one after, while one engine serves the same requests, as it does in a recovery. What the recovery took beyond
its own engine's start is its rest: to notice, to clear away, to load the weights and to be let in.

    python benchmarks/recovery.py [--kills 3]

Prints one JSON object and one line. Targets: the health interval + 2 s; the start-up time x 1.1. About two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentrl.config.presets import DEMO, model_folder
from agentrl.engines.actor import SERVING, LocalEngine, PooledEngine
from agentrl.engines.engine import EngineSpec
from agentrl.engines.pool import EnginePool
from agentrl.processes.server import new_api_key
from agentrl.processes.warden import Warden
from agentrl.rollout.policies.sglang import EngineClient, new_rid
from agentrl.types import SamplingParams
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.sync import WeightSync
from agentrl.weights.transports.files import Files

HEALTH_S, ELSEWHERE_S, RATIO = 15.0, 2.0, 1.1
EPISODES, TOKENS, DEADLINE_S = 8, 64, 300.0
START_S = 300.0


class Load:
    """Episodes without an end, each a request after the other."""

    def __init__(self, client: EngineClient):
        self._client = client
        self.in_flight: dict[str, float] = {}
        self.ended = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._episode(number)) for number in range(EPISODES)]

    async def _episode(self, number: int) -> None:
        drawn = np.random.default_rng(number)
        params = SamplingParams(max_new_tokens=TOKENS)
        while True:
            rid, key = new_rid(), f"{number}-{self.ended}"
            self.in_flight[rid] = time.monotonic()
            prompt = drawn.integers(10, 500, 256).astype(np.int32)
            await self._client.generate(prompt, params, rid=rid, routing_key=key, timeout=DEADLINE_S)
            del self.in_flight[rid]
            self.ended += 1

    async def until_gone(self, rids: set[str]) -> None:
        """Waits until these requests have their answers."""
        while rids & set(self.in_flight):
            self.look()
            await asyncio.sleep(0.01)

    def look(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def killed(pool: TimedPool, load: Load, part: str) -> dict[str, Any]:
    """Kill a part of one engine; seconds until all goes on."""
    place: PooledEngine = next(each for each in pool._places if each.state == SERVING)
    incarnation = place.incarnation
    processes = [psutil.Process(pid) for pid in await place.engine.call("pids")]
    victim = next(p for p in processes if part in " ".join(p.cmdline()))
    began, waiting = time.monotonic(), set(load.in_flight)
    victim.send_signal(signal.SIGKILL)
    await load.until_gone(waiting)
    elsewhere = time.monotonic() - began
    while pool.states() != [SERVING] * len(pool.states()) or place.incarnation == incarnation:
        load.look()
        await asyncio.sleep(0.02)
    back = time.monotonic() - began
    version = await place.control.version()
    if version != "1":
        raise SystemExit(f"the new engine holds version {version}")
    return {
        "part": part,
        "requests": len(waiting),
        "elsewhere": round(elsewhere, 2),
        "back": round(back, 2),
        "rest": round(back - pool.start_s, 2),
    }


class TimedPool(EnginePool):
    """Knows what the last engine took to start."""

    start_s = 0.0

    async def _fill(self, place: PooledEngine) -> Any:
        began = time.monotonic()
        engine = await super()._fill(place)
        self.start_s = time.monotonic() - began
        return engine


async def started(pool: EnginePool, spec: EngineSpec, number: int) -> float:
    """Start an engine beside the pool, while one of the pool's serves; seconds."""
    spared: PooledEngine = pool._places[-1]
    await asyncio.to_thread(pool._router.remove_worker, spared.control.url)
    engine = LocalEngine(spec, name=f"bare-{number}", log_dir=None, host="127.0.0.1", api_key=new_api_key())
    began = time.monotonic()
    try:
        await engine.call("start", START_S)
        return round(time.monotonic() - began, 2)
    finally:
        await engine.end()
        await asyncio.to_thread(pool._router.add_worker, spared.control.url, pool._engine_key)


async def measure(model: str, folder: Path, kills: int) -> dict[str, Any]:
    spec = EngineSpec(model, max_total_tokens=16384, context_length=2048, threads=1, seed=1)
    files = folder / "version-000001"
    files.mkdir()
    for file in Path(model).glob("*.safetensors"):
        shutil.copy(file, files)
    pool = TimedPool(spec, 2, log_dir=folder, start_timeout=START_S, health_interval=HEALTH_S)
    sync = WeightSync(Files(), restore=Files())
    sync.snapshot = Snapshot(1, str(files), (), digest=1)
    pool.attach(sync)
    drawn, faults, starts = random.Random(1), [], []
    try:
        await pool.start()
        await pool.update_weights()
        async with EngineClient(pool.router_url, pool.router_key) as client:
            load = Load(client)
            load.start()
            while load.ended < 2 * EPISODES:
                load.look()
                await asyncio.sleep(0.1)
            starts.append(await started(pool, spec, 0))
            for number in range(kills):
                part = ("sglang::scheduler", "agentrl.engines.server")[number % 2]
                faults.append(await killed(pool, load, part))
                starts.append(await started(pool, spec, number + 1))
                faults[-1]["ratio"] = round(2 * faults[-1]["back"] / (starts[-2] + starts[-1]), 2)
                print(faults[-1], starts[-2:], file=sys.stderr, flush=True)
                await asyncio.sleep(drawn.uniform(0, 2))
            await load.stop()
    finally:
        await pool.stop()
    return {
        "benchmark": "recovery",
        "faults": faults,
        "starts": starts,
        "elsewhere": max(fault["elsewhere"] for fault in faults),
        "rest": max(fault["rest"] for fault in faults),
        "ratio": round(statistics.median(fault["ratio"] for fault in faults), 2),
        "load": os.getloadavg()[0],
        "targets": {"elsewhere": HEALTH_S + ELSEWHERE_S, "ratio": RATIO},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message).100s")
    logging.getLogger("agentrl").setLevel("INFO")
    with Warden() as warden, warden.scratch() as scratch, tempfile.TemporaryDirectory(dir=scratch) as folder:
        result = asyncio.run(measure(model_folder(DEMO), Path(folder), options.kills))
    print(json.dumps(result))
    print(
        f"from kill -9 to the last of its requests answered elsewhere: {result['elsewhere']:.1f} s at most "
        f"(target {HEALTH_S + ELSEWHERE_S:g}); to a new engine at the version taking requests / start-up time: "
        f"{result['ratio']:.2f} (target {RATIO}), of it at most {result['rest']:.1f} s other than the start"
    )
    return int(result["elsewhere"] > HEALTH_S + ELSEWHERE_S or result["ratio"] > RATIO)


if __name__ == "__main__":
    sys.exit(main())
