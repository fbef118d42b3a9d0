"""Log-probabilities at a real vocabulary, forward and backward, against a plain version in chunks of 512 rows.

Plain: for each chunk the logits, ``log_softmax`` and the target's entry, under torch's checkpointing, so that logits of
one chunk exist at a time. Both in one run, alternating; peak memory is that of the process above what it had before.
Prints a line per repeat and, last, one JSON object. Exits 1 when ours takes more time or more memory.

    python benchmarks/log_probs.py [--threads 2] [--repeats 5] [--tokens 1024] [--hidden 512]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 1.0
VOCAB, ROWS = 151_936, 512


def peak_kb() -> int:
    """Most memory of this process since the last :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def settings(doc: str | None, *, repeats: int, tokens: int) -> argparse.Namespace:
    """What the command line says, and torch with as many threads."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return args


def compare(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """Both ways by turns: the first ÷ the second in time, CPU time and peak memory, and how far apart results are."""
    seconds, cpu, peaks, values = ({w: [] for w in ways} for _ in range(4))
    for n in range(-1, repeats):  # the first one warms up
        for which in ways if n % 2 else reversed(ways):
            forget_peak()
            base, began, used = peak_kb(), time.perf_counter(), time.process_time()
            values[which] = ways[which]()
            if n >= 0:
                seconds[which].append(time.perf_counter() - began)
                cpu[which].append(time.process_time() - used)
                peaks[which].append((peak_kb() - base) / 1024)
        if n >= 0:
            print(", ".join(f"{w} {seconds[w][-1]:.2f} s +{peaks[w][-1]:.0f} MB" for w in ways), flush=True)
    one, other = ways
    return {
        "ratio": statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)),
        # Steadier than wall time on a machine that does other things as well.
        "cpu_ratio": statistics.median(a / b for a, b in zip(cpu[one], cpu[other], strict=True)),
        "memory_ratio": statistics.median(peaks[one]) / statistics.median(peaks[other]),
        "apart": float((values[one] - values[other]).abs().max()),
        "seconds": seconds,
        "peaks_mb": peaks,
    }


def main() -> int:
    args = settings(__doc__, repeats=5, tokens=1024)
    import torch
    from torch.utils.checkpoint import checkpoint

    from agentrl.trainer.megatron.log_probs import VocabShard, log_probs

    hidden = torch.randn(args.tokens, args.hidden).mul_(0.1).requires_grad_()
    weight = torch.randn(VOCAB, args.hidden).mul_(0.1).requires_grad_()
    targets, upstream = torch.randint(0, VOCAB, (args.tokens,)), torch.randn(args.tokens)

    def chunk(rows, at):
        return (rows @ weight.t()).log_softmax(-1).gather(1, at[:, None]).squeeze(1)

    def plain():
        pairs = zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
        return torch.cat([checkpoint(chunk, rows, at, use_reentrant=False) for rows, at in pairs])

    def trained(way):
        out = way()
        (out * upstream).sum().backward()
        hidden.grad = weight.grad = None
        return out.detach()

    ways = {
        "ours": lambda: trained(lambda: log_probs(hidden, weight, targets, VocabShard(0, VOCAB))[0]),
        "plain": lambda: trained(plain),
    }
    outcome = compare(ways, args.repeats)
    ratio, memory = outcome["ratio"], outcome["memory_ratio"]
    print(json.dumps({"benchmark": "log_probs", "limit": LIMIT} | outcome | vars(args)))
    print(f"log-probabilities at {VOCAB:,} words / plain, {ROWS} rows a chunk: time {ratio:.2f}, memory {memory:.2f}")
    return int(ratio > LIMIT or memory > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
