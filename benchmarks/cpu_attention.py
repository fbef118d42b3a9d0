"""CPU time of a layer's attention: SGLang's own for plain PyTorch against ours, on batches as rollouts make them.

Both are the engine's classes, called as SGLang calls them, on the same random keys and values of the embedded
model's shape (4 heads, 2 groups, 32 wide). They alternate, each pair gives a ratio of CPU times (ours ÷ SGLang's), the
median counts. One thread. What a real engine has around it (other layers, scheduler, sampling) is not in it.

    python benchmarks/cpu_attention.py [--repeats 9]

Prints one JSON object and one line. Target: at most 0.5 when 64 sequences decode, and in prompts of 32 sequences.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

import torch

from agentrl.engines import cpu_backend

cpu_backend.install()

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402

from agentrl.engines.cpu_attention import BatchedAttention  # noqa: E402

TARGET = 0.5
HEADS, GROUPS, DIM, LAYERS = 4, 2, 32, 4
CASES = {"decode": (64, 0), "prompts": (32, 40)}
"""Sequences, and new tokens of each at the most; 0: one token each, as decoding has."""


class Batch:
    """Sequences of 60 to 360 tokens in a cache, of which the last are new."""

    def __init__(self, sequences: int, most_new: int, rng: random.Random) -> None:
        lengths = [rng.randrange(60, 360) for _ in range(sequences)]
        self.lengths = torch.tensor(lengths)
        self.new = torch.tensor([rng.randrange(1, most_new + 1) if most_new else 1 for _ in lengths])
        self.decode = most_new == 0
        total = sum(lengths)
        self.requests = torch.arange(sequences)
        self.table = torch.zeros(sequences, max(lengths), dtype=torch.int32)
        for request, slots in enumerate(torch.arange(total, dtype=torch.int32).split(lengths)):
            self.table[request, : len(slots)] = slots
        self.keys, self.values = torch.randn(2, total, GROUPS, DIM)
        self.query = torch.randn(int(self.new.sum()), HEADS, DIM)

    def run(self, attention: TorchNativeAttnBackend) -> float:
        """CPU seconds of one forward pass's attention."""
        began = time.process_time()
        attention._plan = None
        output = torch.empty_like(self.query)
        place = (self.query, output, self.keys, self.values, self.table, self.requests, self.lengths)
        options = {"scaling": DIM**-0.5, "enable_gqa": True, "is_cross_attn": False}
        for _ in range(LAYERS):
            if self.decode:
                attention._run_sdpa_forward_decode(*place, None, causal=False, **options)
            else:
                attention._run_sdpa_forward_extend(
                    *place, self.lengths - self.new, self.new, None, causal=True, **options
                )
        return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    theirs = object.__new__(TorchNativeAttnBackend)
    ours = object.__new__(type("Batched", (BatchedAttention, TorchNativeAttnBackend), {}))
    result: dict[str, object] = {"benchmark": "cpu_attention", "target": TARGET}
    for name, shape in CASES.items():
        pairs = []
        for _ in range(options.repeats + 1):  # the first warms up
            batch = Batch(*shape, rng)
            pairs.append((batch.run(ours), batch.run(theirs)))
        pairs = pairs[1:]
        result[name] = round(statistics.median(a / b for a, b in pairs), 3)
        result[f"{name}_ms"] = [round(1e3 * statistics.median(side), 2) for side in zip(*pairs, strict=True)]
    print(json.dumps(result))
    print(
        f"attention on the CPU, ours ÷ SGLang's: {result['decode']} decoding, {result['prompts']} in prompts; "
        f"target {TARGET}"
    )
    return int(max(result[name] for name in CASES) > TARGET)


if __name__ == "__main__":
    sys.exit(main())
