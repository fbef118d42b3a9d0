"""One training batch under every parallel layout: loss and gradient norm against a single process.

Each layout runs the same micro-batch budget, weights and batch in float32 over gloo and takes two
optimizer steps. Prints a line per layout and, last, one JSON object. Exits 1 when a relative
difference is not below 1e-4.

    python benchmarks/parallel_layouts.py [--ranks 2]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np
from trainer_step import SHAPES, write_checkpoint

LIMIT = 1e-4
INTERLEAVED = {"pipeline_model_parallel_size": 2, "megatron": {"virtual_pipeline_model_parallel_size": 2}}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = {
    "1x1x1": {},
    "dp2": {},
    "dp2 distributed optimizer": {"use_distributed_optimizer": True},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2 sequence parallel, recomputed": {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "megatron": FULL
    },
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2 interleaved": INTERLEAVED,
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 pp2 interleaved": {**INTERLEAVED, "tensor_model_parallel_size": 2},
    "pp2 dp2": {"pipeline_model_parallel_size": 2},
    "pp2 interleaved dp2 distributed optimizer": {**INTERLEAVED, "use_distributed_optimizer": True},
    "tp2 dp2 sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
RANKS = {"1x1x1": 1} | {name: 4 for name in LAYOUTS if len({"tp2", "pp2", "dp2"} & set(name.split())) == 2}


def make_batch(seed: int = 0):
    """32 samples of 40 to 160 tokens, half of them sampled."""
    from agentrl.algorithms import TrainBatch
    from agentrl.types import Group, Segment, Task, Trajectory

    rng = np.random.default_rng(seed)
    samples, advantages = [], []
    for _ in range(32):
        n = int(rng.integers(40, 160))
        mask = (rng.random(n) < 0.5).astype(np.uint8)
        mask[:8] = 0
        samples.append(
            Segment(
                tokens=rng.integers(0, 2048, n).astype(np.int32),
                loss_mask=mask,
                logprobs=(mask * rng.normal(-7.6, 0.1, n)).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                prompt_length=int(mask.argmax()),
            )
        )
        advantages.append((mask * rng.normal()).astype(np.float32))
    task, many = Task("task", 0), enumerate(samples)
    trajectories = [Trajectory(f"t{i}", f"g{i // 8}", task, [segment], []) for i, segment in many]
    batch = TrainBatch.from_groups([Group("g", task, trajectories)], {t.trajectory_id for t in trajectories})
    return batch.with_columns(advantage=np.concatenate(advantages), old=batch["rollout"])


def run(rank: int, ranks: int, names: list[str], listeners: list[socket.socket], checkpoint: str, out: str) -> None:
    """What one process does: every layout of this number of ranks, one after the other."""
    from agentrl.config.schema import TrainerOptions
    from agentrl.trainer.megatron.trainer import MegatronTrainer

    batch, results = make_batch(), {}
    for name, listener in zip(names, listeners, strict=True):
        options = TrainerOptions(
            lr=1e-3, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01, rollout_temperature=0.8,
            max_tokens_per_gpu=600, distributed_timeout_minutes=2, logprob_abs_diff_stop=0.0, **LAYOUTS[name],
        )  # fmt: skip
        port = listener.getsockname()[1]
        if rank:
            listener.close()
        trainer = MegatronTrainer(
            rank, ranks, f"tcp://127.0.0.1:{port}", checkpoint, options, listener=None if rank else listener
        )
        batch = batch.with_columns(**trainer.infer(batch, ["ref"]))
        steps = [trainer.update(batch)[0] for _ in range(2)]
        results[name] = {key: [s[f"train/{key}"] for s in steps] for key in ("loss", "grad_norm", "kl_loss", "entropy")}
        trainer.close()
    if rank == 0:
        Path(out).write_text(json.dumps(results))


def spawn(ranks: int, names: list[str], checkpoint: str, folder: Path) -> dict:
    import torch.multiprocessing as mp

    out = folder / f"{ranks}.json"
    os.environ["OMP_NUM_THREADS"] = "1"
    # Sockets that already listen: nobody else can take a port before its turn comes.
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    mp.spawn(run, args=(ranks, names, listeners, checkpoint, str(out)), nprocs=ranks)
    return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="largest number of processes (2 or 4)")
    most = parser.parse_args().ranks
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/model", SHAPES["demo"])
        for ranks in (1, 2, 4):
            names = [n for n in LAYOUTS if RANKS.get(n, 2) == ranks]
            if ranks <= most:
                results |= spawn(ranks, names, str(Path(folder) / "model"), Path(folder))
    alone = results["1x1x1"]
    worst = {}
    for name, result in results.items():
        differences = {
            key: max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(values, alone[key], strict=True))
            for key, values in result.items()
        }
        worst[name] = differences
        print(
            f"{name:42s} loss {result['loss'][0]:+.7f} {result['loss'][1]:+.7f}  grad norm "
            f"{result['grad_norm'][0]:.6f} {result['grad_norm'][1]:.6f}  largest relative difference "
            f"loss {differences['loss']:.1e} grad norm {differences['grad_norm']:.1e}"
        )
    largest = max(max(d["loss"], d["grad_norm"]) for d in worst.values())
    outcome = {"benchmark": "parallel_layouts", "largest": largest, "limit": LIMIT, "relative_difference": worst}
    print(json.dumps(outcome))
    print(f"loss and gradient norm of {len(worst)} layouts, against 1x1x1: {largest:.1e}; target under {LIMIT:.0e}")
    return int(largest >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
