"""Work of data-parallel ranks: the longest rank's FLOPs ÷ the mean, for batches of real search episodes.

Episodes are those of two rollouts of the demo (``search_episodes.json``: tokens, and how many of them were sampled), as
they are and 20 times as long, as episodes over real documents are; or those of stored trajectories. Every batch that a
run would make of them is scheduled, of 64 and of 128 episodes; the worst one counts. Beside it what the same schedule
gives when a sequence counts by its tokens. No model runs. Prints a line per case and, last, one JSON object. Exits 1
when a rank has more than the limit.

    python benchmarks/balance.py [--ranks 4] [--trajectories FILE.parquet ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from agentrl.families.flops import Flops
from agentrl.trainer.packing import Step, schedule

LIMIT = 1.05
EPISODES = Path(__file__).resolve().parent / "search_episodes.json"
SHAPES = {
    "demo": {
        "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip


def episodes(files: Sequence[str]) -> np.ndarray:
    """int[N, 2]: tokens and sampled tokens of each episode."""
    if not files:
        return np.array(json.loads(EPISODES.read_text()))
    import pyarrow.parquet as pq

    tables = [pq.read_table(file, columns=["num_tokens", "num_sampled"]) for file in files]
    return np.concatenate([np.stack([table[0].to_numpy(), table[1].to_numpy()], 1) for table in tables])


def longest(step: Step, costs: Sequence[int]) -> float:
    """The longest rank's work ÷ the mean."""
    loads = [sum(costs[i] for samples in rank for i in samples) for rank in step.ranks]
    return max(loads) * len(loads) / sum(loads)


def cases(rows: np.ndarray, ranks: int, max_tokens: int) -> Iterator[dict]:
    for name, shape in SHAPES.items():
        flops = Flops.of(shape)
        for times in (1, 20):
            for size in sorted({min(size, len(rows)) for size in (64, 128)}):
                found: dict[str, list[float]] = {"flops": [], "tokens": []}
                for start in range(0, len(rows) - size + 1, size):
                    sizes = [(int(n) * times, int(s) * times) for n, s in rows[start : start + size]]
                    lengths, costs = [n for n, _ in sizes], [flops.sequence(n, s) for n, s in sizes]
                    for by, given in (("flops", costs), ("tokens", None)):
                        (step,) = schedule(lengths, costs=given, dp=ranks, max_tokens=max_tokens)
                        found[by].append(longest(step, costs))
                yield {
                    "shape": name, "times": times, "episodes": size, "batches": len(found["flops"]),
                    "ratio": max(found["flops"]), "by_tokens": max(found["tokens"]),
                }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--trajectories", nargs="*", default=[], help="stored trajectories in place of the demo's")
    args = parser.parse_args()
    results = list(cases(episodes(args.trajectories), args.ranks, args.max_tokens))
    for r in results:
        print(
            f"{r['shape']}, {r['episodes']} episodes x{r['times']}: longest rank / mean {r['ratio']:.4f} "
            f"(by tokens {r['by_tokens']:.4f}), worst of {r['batches']} batches"
        )
    worst = max(r["ratio"] for r in results)
    by_tokens = max(r["by_tokens"] for r in results)
    print(json.dumps({"benchmark": "balance", "limit": LIMIT, "ranks": args.ranks, "worst": worst, "cases": results}))
    print(
        f"longest data-parallel rank's FLOPs / mean, {args.ranks} ranks: {worst:.3f} (by tokens {by_tokens:.3f}); "
        f"target at most {LIMIT}"
    )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
