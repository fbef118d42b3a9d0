"""How long the loop is blocked by a save that is written beside what follows, against one that it waits for.

A model of about 50 M parameters with Adam's moments in one rank, and the run's own
:class:`~agentrl.data.checkpoint.CheckpointStore`: state and Hugging Face folder are written, hashed, synced and
renamed. *Blocked* is the time of ``CheckpointStore.save``. Both are timed in turn, each when nothing else is being
written, and after an update, as in the loop. The update that follows runs beside the writing, and is compared with one
that has the machine for itself.

    python benchmarks/async_save.py [--repeats 5] [--folder DIR]

Prints a line per repeat, one JSON object and one line. Exits 1 when the ratio is above 0.2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer_step import make_batch, write_checkpoint

LIMIT = 0.2
SHAPE = dict(layers=8, hidden=512, heads=8, groups=4, dim=64, ffn=1536, vocab=49_152, tokens=400)


class Rank:
    """A rank in this process, as the store and the loop see it: calls take turns, writing goes on beside them."""

    def __init__(self, actor: Any):
        self.actor = actor

    async def save(self, path: Path, *, later: bool = False) -> None:
        await asyncio.to_thread(self.actor.save, str(path), later=later)

    async def save_hf(self, path: Path, *, later: bool = False) -> None:
        await asyncio.to_thread(self.actor.save_hf, str(path), later=later)

    async def write(self) -> None:
        await asyncio.to_thread(self.actor.write)

    async def update(self, batch: Any) -> float:
        """Seconds of a training step."""
        began = time.perf_counter()
        await asyncio.to_thread(self.actor.update, batch, {})
        return time.perf_counter() - began


class Rollout:
    async def state(self) -> dict[str, Any]:
        return {}


async def measure(rank: Rank, folder: Path, batch: Any, repeats: int) -> dict[str, float]:
    from agentrl.data.checkpoint import CheckpointStore

    seconds: dict[str, list[float]] = {"blocked": [], "waited": [], "written": [], "beside": [], "alone": []}
    await rank.update(batch)
    for n in range(repeats + 1):
        for later in (False, True) if n % 2 == 0 else (True, False):
            store = CheckpointStore(folder, keep_last=1, async_save=later)
            alone = await rank.update(batch)
            began = time.perf_counter()
            await store.save(2 * n + later, trainer=rank, rollout=Rollout())
            blocked = time.perf_counter() - began
            if later:
                beside = await rank.update(batch)
                await store.saved()
            if n == 0:
                continue  # the first of each finds an empty folder and memory that was never touched
            seconds["blocked" if later else "waited"].append(blocked)
            seconds["alone"].append(alone)
            if later:
                seconds["written"].append(time.perf_counter() - began)
                seconds["beside"].append(beside)
        if n:
            print(f"{n}: blocked {seconds['blocked'][-1]:.2f} s, waited {seconds['waited'][-1]:.2f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [b / w for b, w in zip(seconds["blocked"], seconds["waited"], strict=True)]
    return {"ratio": statistics.median(ratios), **{f"{name}_s": value for name, value in medians.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; default: the system's for temporary files")
    args = parser.parse_args()

    from agentrl.config.schema import TrainerOptions
    from agentrl.trainer.ranks import TrainActor

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        write_checkpoint(f"{folder}/model", SHAPE)
        options = TrainerOptions(lr=1e-5, max_tokens_per_gpu=1024, threads=1, logprob_abs_diff_stop=0.0)
        actor = TrainActor(0, 1, f"{folder}/model", options, log_file=f"{folder}/log")
        actor.start(actor.meeting_point())
        parameters = sum(p.numel() for p in actor._trainer.policy.core.model.parameters())
        figures = asyncio.run(measure(Rank(actor), Path(folder, "checkpoints"), make_batch(SHAPE), args.repeats))
        size = sum(p.stat().st_size for p in Path(folder, "checkpoints").rglob("*") if p.is_file())
        actor.close()
    print(json.dumps({"parameters": parameters, "bytes": size, **figures}))
    print(
        f"asynchronous save: blocks for {figures['ratio']:.2f} of a synchronous one (at most {LIMIT}), "
        f"{figures['blocked_s']:.2f} ÷ {figures['waited_s']:.2f} s at {parameters / 1e6:.0f} M parameters, "
        f"{size / 1e6:.0f} MB"
    )
    return int(figures["ratio"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
