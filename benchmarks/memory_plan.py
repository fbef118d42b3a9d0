"""Planned memory of a trainer rank against what a process takes on the CPU, part by part.

For each model and precision a fresh process builds the trainer, makes a step on full micro-batches, and reads its own
memory from the kernel (`/proc/self/smaps_rollup`, and the peak, `VmHWM`): once it is built (weights, gradients), what
its first step adds (Adam's moments), and the peak of a later step above that. Prints a line per part and, last, one
JSON object. Exits 1 when a total is off by more than 15 %.

    python benchmarks/memory_plan.py [--case NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from trainer_step import write_checkpoint

LIMIT = 0.15
MIB = 1 << 20
CASES = {
    "deep, fp32": dict(layers=8, hidden=384, heads=6, groups=3, ffn=1152, vocab=8192, tokens=2048, dtype="fp32"),
    "deep, bf16": dict(layers=8, hidden=384, heads=6, groups=3, ffn=1152, vocab=8192, tokens=2048, dtype="bf16"),
    "vocabulary, fp32": dict(layers=2, hidden=384, heads=6, groups=2, ffn=1152, vocab=65536, tokens=1024, dtype="fp32"),
    "long, fp32": dict(layers=3, hidden=256, heads=4, groups=4, ffn=768, vocab=4096, tokens=8192, dtype="fp32"),
    "recomputed, fp32": dict(
        layers=8, hidden=384, heads=6, groups=3, ffn=1152, vocab=8192, tokens=2048, dtype="fp32", full=True
    ),
}


def options_of(s: dict, folder: str):
    """The run's options for a case."""
    from agentrl.config.schema import Config

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Config(
        env="search", hf_checkpoint=folder, lr=1e-5, max_tokens_per_gpu=s["tokens"], rollout_max_context_len=512,
        dtype=s["dtype"], actor_num_gpus_per_node=1, logprob_abs_diff_stop=0.0, threads=2,
        megatron=full if s.get("full") else {},
    )  # fmt: skip


def resident() -> int:
    """Bytes of memory that are this process's own."""
    import gc

    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty:"))


def peak(reset: bool = False) -> int:
    """The most bytes that were resident since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def batch_of(s: dict):
    """Two micro-batches of sequences of 512 tokens, all of them sampled but the first 8."""
    import numpy as np

    from agentrl.algorithms import TrainBatch
    from agentrl.types import Group, Segment, Task, Trajectory

    rng, task = np.random.default_rng(0), Task("task", 0)
    trajectories = []
    for i in range(2 * s["tokens"] // 512):
        mask = np.r_[np.zeros(8, np.uint8), np.ones(504, np.uint8)]
        segment = Segment(
            tokens=rng.integers(0, s["vocab"], 512).astype(np.int32),
            loss_mask=mask,
            logprobs=(mask * -np.log(s["vocab"])).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            prompt_length=8,
        )
        trajectories.append(Trajectory(f"t{i}", f"g{i // 8}", task, [segment], []))
    batch = TrainBatch.from_groups([Group("g", task, trajectories)], {t.trajectory_id for t in trajectories})
    return batch.with_columns(advantage=rng.normal(size=batch.num_tokens).astype(np.float32), old=batch["rollout"])


def measure(s: dict, folder: str) -> dict[str, float]:
    """Bytes taken by each part, in this process."""
    import torch

    from agentrl.config.schema import TrainerOptions
    from agentrl.trainer.megatron.trainer import MegatronTrainer

    torch.set_num_threads(2)
    options = options_of(s, folder).section(TrainerOptions)
    small = batch_of({**s, "tokens": 512})
    before = resident()
    trainer = MegatronTrainer(0, 1, f"file://{folder}/store", folder, options)
    for buffer in trainer.policy.core.ddp.buffers:
        buffer.grad_data.fill_(0)  # pages of zeros that nobody wrote are not there yet
    static = resident() - before
    trainer.update(small)  # the moments are made at the first step
    settled = resident()
    batch = batch_of(s)
    floor = peak(reset=True)
    trainer.update(batch)
    top = peak()
    return {"built": static, "first step": settled - before - static, "peak": top - floor}


def planned(s: dict, folder: str) -> dict[str, float]:
    """The same from the plan."""
    from agentrl.planning import Shape, memory_of

    memory = memory_of(options_of(s, folder), Shape.of(folder), "cpu")
    masters = memory.optimizer / 3 if s["dtype"] == "bf16" else 0  # float32 weights are made with the optimizer
    return {
        "built": memory.weights + memory.gradients + masters,
        "first step": memory.optimizer - masters,
        "peak": max(memory.activations, memory.step),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(CASES[args.case[0]], args.measure)))
        return 0
    result = {}
    for name in args.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(folder, CASES[name] | {"dim": 64}, longest=20_000)
            command = [sys.executable, __file__, "--case", name, "--measure", folder]
            env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}  # freed memory goes back
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
            if done.returncode:
                raise RuntimeError(done.stderr)
            found, expected = json.loads(done.stdout.splitlines()[-1]), planned(CASES[name], folder)
        for part in (*found, "total"):
            real = sum(found.values()) if part == "total" else found[part]
            plan = sum(expected.values()) if part == "total" else expected[part]
            print(f"{name}: {part}: {real / MIB:.0f} MiB, planned {plan / MIB:.0f} MiB, ratio {plan / real:.2f}")
        result[name] = round(plan / real, 3)
    print(json.dumps(result))
    return int(any(abs(ratio - 1) > LIMIT for ratio in result.values()))


if __name__ == "__main__":
    sys.exit(main())
