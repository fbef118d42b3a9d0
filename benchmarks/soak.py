"""Memory of driver and rollout manager after 2,000 steps against that after 200.

Real: the training loop, the run folder with metrics, TensorBoard and checkpoints, the rollout manager with its account,
dispatcher, sink and store of episodes, the episode loop with the environment ``search`` and its tool, the client. Not
real: the engine, a process that answers every request on loopback with the same turn; the trainer, which gives columns
of zeros; Ray, between the two. Both live in one process here, whose resident memory is taken, after a collection.

    python benchmarks/soak.py [--steps 2000]

Prints one JSON object and one line. Target: at most 1.1. Five to ten minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import workers
from rich.console import Console

from agentrl.algorithms import TrainBatch
from agentrl.config import load_config
from agentrl.config.schema import Config
from agentrl.data.checkpoint import CheckpointStore
from agentrl.data.run_folder import RunDir
from agentrl.engines.world import World
from agentrl.orchestrator.engine_service import EngineService, weight_sync
from agentrl.orchestrator.loop import training_loop
from agentrl.orchestrator.manager import RolloutManager, open_template
from agentrl.orchestrator.workers import Setting
from agentrl.progress import Progress
from agentrl.rollout.options import episode_limits, rollout_params

RATIO, EARLY = 1.1, 200


class Trainer:
    """Learns nothing."""

    num_steps = 1

    async def ready(self) -> None: ...

    async def publish(self, version: int) -> int:
        return version

    async def fetch(self, batch: list[TrainBatch]) -> TrainBatch:
        return batch[0]

    async def infer(self, batch: list[TrainBatch], names: Any) -> dict[str, np.ndarray]:
        return {name: np.zeros(batch[0].num_tokens, np.float32) for name in names}

    async def update(self, batch: Any, columns: Any, **how: bool) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        return {"train/grad_norm": 1.0, "train/loss": 0.0}, {}

    async def save(self, path: Path, *, later: bool = False) -> None:
        path.mkdir()
        (path / "weights").write_bytes(bytes(1 << 16))

    async def save_hf(self, path: Path, *, later: bool = False) -> None:
        path.mkdir()
        (path / "model.safetensors").write_bytes(bytes(1 << 16))

    async def write(self) -> None: ...


class Rollout:
    """The manager without Ray in between, and a look at the memory."""

    def __init__(self, manager: RolloutManager):
        self.manager, self.seen = manager, {}
        self.mark_trained, self.state = manager.mark_trained, manager.state

    async def generate(self, step: int, *, progress: Progress) -> Any:
        if step and step % (EARLY // 2) == 0:
            gc.collect()
            self.seen[step] = psutil.Process().memory_info().rss
            print(f"step {step}: {self.seen[step] / 2**20:.1f} MiB", file=sys.stderr, flush=True)
        generated = await self.manager.generate(step)
        counted, *_ = await self.manager.peek(f"rollout {step}")
        progress.counted(counted["done"], counted["total"])
        return generated

    async def update_weights(self, snapshot: int) -> dict[str, float]:
        return {"time/sync": 0.0}


async def soak(cfg: Config, url: str) -> dict[int, int]:
    run = RunDir.create(cfg)
    run.note_start()
    manager = RolloutManager(cfg, str(run.path), str(cfg.hf_checkpoint), [{}], World())
    manager.chat, _ = open_template(cfg, str(cfg.hf_checkpoint))
    engines: Any = SimpleNamespace(attach=lambda updater: None, broken=None)
    manager.engines = EngineService(engines, weight_sync(cfg, World(), None))
    manager.workers = await manager._start_workers(url, "key")
    account, held_out = manager._open_data()
    setting = Setting("train", *cfg.env_spec(), rollout_params(cfg), episode_limits(cfg))
    manager._put_together(account, manager.workers.open(setting), held_out)
    rollout: Any = Rollout(manager)
    trainer: Any = Trainer()
    run.go_on(0)
    with Progress("soak", cfg.num_rollout, console=Console(file=io.StringIO())) as progress:
        await training_loop(
            cfg, start=0, trainer=trainer, rollout=rollout, run=run, progress=progress, world=World(),
            checkpoints=CheckpointStore(run.checkpoints, keep_last=2),
        )  # fmt: skip
    trained = manager.account.counts["trained"]
    if trained != cfg.num_rollout * cfg.rollout_batch_size:
        raise SystemExit(f"{trained} groups were trained, of {cfg.num_rollout} rollouts")
    await manager.runner.close()
    await manager.workers.close()
    return rollout.seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    workers.LATENCY_S = 0.0
    sys.modules["ray"] = SimpleNamespace(put=lambda batch: batch)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="soak-") as temp:
        cfg = load_config(
            ["--env", "search", "--output-dir", f"{temp}/run", "--num-rollout", str(options.steps + 1),
             "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--max-turns", "2", "--save-interval", "50",
             "--eval-interval", "0", "--advantage-estimator", "reinforce_plus_plus_baseline"]
        )  # fmt: skip
        receiver, sender = multiprocessing.Pipe(duplex=False)
        engine = multiprocessing.get_context("fork").Process(
            target=workers.serve, args=(workers.reply_of(cfg, str(cfg.hf_checkpoint)), sender), daemon=True
        )
        engine.start()
        began = time.monotonic()
        try:
            seen = asyncio.run(soak(cfg, f"http://127.0.0.1:{receiver.recv()}"))
        finally:
            engine.terminate()
            engine.join()
    early, late = seen[EARLY], seen[max(seen)]
    result = {
        "benchmark": "soak",
        "mib": {step: round(size / 2**20, 1) for step, size in seen.items()},
        "ratio": round(late / early, 3),
        "steps": max(seen),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "load": os.getloadavg()[0],
        "target": RATIO,
    }
    print(json.dumps(result))
    print(
        f"driver and manager: {late / 2**20:.0f} MiB after {max(seen)} steps / {early / 2**20:.0f} MiB after {EARLY}: "
        f"{result['ratio']:.3f} (target {RATIO})"
    )
    return int(result["ratio"] > RATIO)


if __name__ == "__main__":
    sys.exit(main())
