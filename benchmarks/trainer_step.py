"""A GRPO step of the trainer against a bare Megatron-core step on the same tokens, interleaved in one run.

Ours: packing, log-probabilities, clipped surrogate with all metrics, backward, optimizer. Bare: the same
GPTModel, DistributedDataParallel and optimizer on the same packed micro-batches with Megatron's own
cross-entropy over all positions. Prints a line per repeat and, last, one JSON object. Exits 1 when a
ratio is above 1.

    python benchmarks/trainer_step.py [--threads 2] [--repeats 5] [--shape demo|larger]
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

LIMIT = 1.0
SHAPES = {
    "demo": dict(layers=4, hidden=128, heads=4, groups=2, dim=32, ffn=384, vocab=2048, tokens=60_000),
    "larger": dict(layers=6, hidden=384, heads=6, groups=2, dim=64, ffn=1024, vocab=8192, tokens=12_000),
}


def write_checkpoint(path: str, s: dict, *, longest: int = 2048) -> None:
    """A random Qwen3 of this shape."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=s["vocab"], hidden_size=s["hidden"], intermediate_size=s["ffn"], num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"], num_key_value_heads=s["groups"], head_dim=s["dim"],
        max_position_embeddings=longest, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def make_batch(s: dict, seed: int = 0):
    """Sequences of about 250 tokens, about 40 % of them sampled, in turns as an agent's are."""
    from agentrl.algorithms import TrainBatch
    from agentrl.types import Group, Segment, Task, Trajectory

    rng = np.random.default_rng(seed)
    samples, advantages, total = [], [], 0
    while total < s["tokens"]:
        n = int(np.clip(rng.lognormal(np.log(240), 0.25), 60, 700))
        mask = np.zeros(n, np.uint8)
        at = n // 4
        while at < n:
            turn = int(rng.integers(15, 50))
            mask[at : at + turn] = 1
            at += turn + int(rng.integers(20, 80))
        samples.append(
            Segment(
                tokens=rng.integers(0, s["vocab"], n).astype(np.int32),
                loss_mask=mask,
                logprobs=(mask * -np.log(s["vocab"])).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                prompt_length=int(mask.argmax()),
            )
        )
        advantages.append((mask * rng.normal()).astype(np.float32))
        total += n
    task, many = Task("task", 0), enumerate(samples)
    trajectories = [Trajectory(f"t{i}", f"g{i // 8}", task, [segment], []) for i, segment in many]
    batch = TrainBatch.from_groups([Group("g", task, trajectories)], {t.trajectory_id for t in trajectories})
    return batch.with_columns(advantage=np.concatenate(advantages), old=batch["rollout"])


class Bare:
    """A plain Megatron training step on given packed micro-batches."""

    def __init__(self, trainer, batch):
        self.core = trainer.policy.core
        (step,) = self.core.schedule(batch)
        self.micro_batches = [self.core.pack(batch, samples) for samples in step.ranks[0]]
        self.labels = [packed.tokens.roll(-1) for packed in self.micro_batches]

    def step(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        core = self.core
        data = iter(zip(self.micro_batches, self.labels, strict=True))

        def forward(iterator, model):
            packed, labels = next(iterator)
            losses = model(
                input_ids=packed.tokens, position_ids=packed.packing.positions[None], attention_mask=None,
                packed_seq_params=packed.packing, labels=labels,
            )  # fmt: skip
            return losses, lambda x: (x.mean(), {"loss": x.detach().mean()})

        core.ddp.zero_grad_buffer()
        core.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=data, model=core.ddp,
            num_microbatches=len(self.micro_batches), seq_length=1, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        core.optimizer.step()


def measure(name: str, threads: int, repeats: int, max_tokens: int) -> dict:
    from agentrl.config.schema import TrainerOptions
    from agentrl.trainer.megatron.trainer import MegatronTrainer

    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, shape)
        options = TrainerOptions(lr=1e-5, max_tokens_per_gpu=max_tokens, threads=threads, logprob_abs_diff_stop=0.0)
        trainer = MegatronTrainer(0, 1, f"file://{folder}/store", folder, options)
    batch = make_batch(shape)
    bare = Bare(trainer, batch)
    trainer.update(batch)
    bare.step()
    ours_s, bare_s, cpu_s = [], [], {"ours": [], "bare": []}
    for n in range(repeats):
        pair = [("ours", lambda: trainer.update(batch)), ("bare", bare.step)]
        seconds = {}
        for which, run in pair if n % 2 == 0 else reversed(pair):
            began, cpu = time.perf_counter(), time.process_time()
            run()
            seconds[which] = time.perf_counter() - began
            cpu_s[which].append(time.process_time() - cpu)
        ours_s.append(seconds["ours"])
        bare_s.append(seconds["bare"])
        print(f"{name} {n}: ours {seconds['ours']:.3f} s, bare {seconds['bare']:.3f} s, {ours_s[-1] / bare_s[-1]:.3f}")
    trainer.close()
    ratios = [a / b for a, b in zip(ours_s, bare_s, strict=True)]
    return {
        "tokens": batch.num_tokens,
        "sampled": batch.num_sampled,
        "sequences": len(batch),
        "ours_s": statistics.median(ours_s),
        "bare_s": statistics.median(bare_s),
        "ratio": statistics.median(ratios),
        # Steadier than wall time on a machine that does other things as well.
        "cpu_ratio": statistics.median(a / b for a, b in zip(cpu_s["ours"], cpu_s["bare"], strict=True)),
        "tokens_per_s": batch.num_tokens / statistics.median(ours_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the trainer's actor sets it
    names = list(SHAPES) if args.shape == "all" else [args.shape]
    results = {name: measure(name, args.threads, args.repeats, args.max_tokens) for name in names}
    worst = max(r["ratio"] for r in results.values())
    outcome = {"benchmark": "trainer_step", "limit": LIMIT, "worst": worst, "threads": args.threads, "shapes": results}
    print(json.dumps(outcome))
    told = ", ".join(f"{name} {r['ratio']:.2f} ({r['tokens_per_s']:,.0f} tokens/s)" for name, r in results.items())
    print(f"training step / bare Megatron step on the same tokens: {told}; target at most {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
