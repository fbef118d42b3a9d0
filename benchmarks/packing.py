"""A training step on packed sequences against one on padded ones, lengths of real search episodes, in one run.

Episodes are those of two rollouts of the demo (``search_episodes.json``), 256 each. Padded: each sequence goes on with
tokens that are not trained on to the length of the longest of its rollout, as a rectangle of tokens has it; trainer,
loss, optimizer and the tokens of a micro-batch are the same. Both ways by turns. Prints a line per repeat and, last,
one JSON object. Exits 1 when packed takes more than the limit of padded, over both rollouts.

    python benchmarks/packing.py [--threads 2] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import numpy as np
from balance import episodes
from trainer_step import SHAPES, write_checkpoint

LIMIT = 0.6
ROLLOUT = 256


def make_batch(rows: np.ndarray, vocab: int, *, padded: bool):
    """Episodes of these tokens and sampled tokens, with random tokens; the sampled ones in two turns."""
    from agentrl.algorithms import TrainBatch
    from agentrl.types import Group, Segment, Task, Trajectory

    rng, task, trajectories, advantages = np.random.default_rng(0), Task("task", 0), [], []
    longest = int(rows[:, 0].max())
    for i, (n, sampled) in enumerate(rows.tolist()):
        mask = np.zeros(longest if padded else n, np.uint8)
        mask[n // 2 : n // 2 + sampled // 2] = 1
        mask[n - (sampled - sampled // 2) : n] = 1
        segment = Segment(
            tokens=rng.integers(0, vocab, len(mask)).astype(np.int32),
            loss_mask=mask,
            logprobs=(mask * -np.log(vocab)).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            prompt_length=n // 2,
        )
        trajectories.append(Trajectory(f"t{i}", f"g{i // 8}", task, [segment], []))
        advantages.append((mask * rng.normal()).astype(np.float32))
    batch = TrainBatch.from_groups([Group("g", task, trajectories)], {t.trajectory_id for t in trajectories})
    return batch.with_columns(advantage=np.concatenate(advantages), old=batch["rollout"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the trainer's actor sets it
    from agentrl.config.schema import TrainerOptions
    from agentrl.trainer.megatron.trainer import MegatronTrainer

    shape, rows = SHAPES["demo"], episodes([])
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, shape)
        options = TrainerOptions(lr=1e-5, max_tokens_per_gpu=8192, threads=args.threads, logprob_abs_diff_stop=0.0)
        trainer = MegatronTrainer(0, 1, f"file://{folder}/store", folder, options)
    rollouts = []
    for number, start in enumerate(range(0, len(rows), ROLLOUT)):
        own = rows[start : start + ROLLOUT]
        batches = {way: make_batch(own, shape["vocab"], padded=way == "padded") for way in ("packed", "padded")}
        took: dict[str, list[float]] = {way: [] for way in batches}
        cpu: dict[str, list[float]] = {way: [] for way in batches}
        trainer.update(make_batch(own[:16], shape["vocab"], padded=False))  # warms up
        for n in range(args.repeats):
            for way in batches if n % 2 else reversed(batches):
                began, used = time.perf_counter(), time.process_time()
                trainer.update(batches[way])
                took[way].append(time.perf_counter() - began)
                cpu[way].append(time.process_time() - used)
            told = f"packed {took['packed'][-1]:.2f} s, padded {took['padded'][-1]:.2f} s"
            print(f"rollout {number}: {told}", flush=True)
        seconds = {way: statistics.median(values) for way, values in took.items()}
        # Steadier than wall time on a machine that does other things as well.
        cpu_seconds = {way: statistics.median(values) for way, values in cpu.items()}
        tokens = {way: batch.num_tokens for way, batch in batches.items()}
        rollouts.append({"longest": int(own[:, 0].max()), "seconds": seconds, "cpu": cpu_seconds, "tokens": tokens})
    trainer.close()
    ratio = sum(r["seconds"]["packed"] for r in rollouts) / sum(r["seconds"]["padded"] for r in rollouts)
    cpu_ratio = sum(r["cpu"]["packed"] for r in rollouts) / sum(r["cpu"]["padded"] for r in rollouts)
    each = [r["seconds"]["packed"] / r["seconds"]["padded"] for r in rollouts]
    outcome = {"benchmark": "packing", "limit": LIMIT, "ratio": ratio, "cpu_ratio": cpu_ratio, "each": each}
    print(json.dumps(outcome | {"rollouts": rollouts}))
    told = ", ".join(f"{x:.2f} where the longest has {r['longest']}" for x, r in zip(each, rollouts, strict=True))
    print(
        f"packed / padded training step, search episodes: {ratio:.2f} ({told}; {cpu_ratio:.2f} in CPU time); target at "
        f"most {LIMIT}"
    )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
