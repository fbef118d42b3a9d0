"""The log-probability pass at a real vocabulary against the way with all logits, in one run: peak memory and time.

All logits: ``(hidden @ weight.T).log_softmax(-1)`` and the target's entry, without gradients, float32. Peak memory is
that of the process above what it had before. Both ways by turns. Prints a line per repeat and, last, one JSON object.
Exits 1 when ours takes more than the limits. The other way takes 5 GB.

    python benchmarks/log_prob_pass.py [--threads 2] [--repeats 3] [--tokens 4096] [--hidden 512]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

from log_probs import VOCAB, forget_peak, peak_kb

MEMORY, TIME = 0.1, 1.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    from agentrl.trainer.megatron.log_probs import VocabShard, log_probs

    torch.set_num_threads(args.threads)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=g).mul_(0.1)
    weight = torch.randn(VOCAB, args.hidden, generator=g).mul_(0.1)
    targets = torch.randint(0, VOCAB, (args.tokens,), generator=g)
    ways = {
        "ours": lambda: log_probs(hidden, weight, targets, VocabShard(0, VOCAB))[0],
        "all logits": lambda: (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1),
    }
    seconds, cpu, peaks, values = ({w: [] for w in ways} for _ in range(4))
    with torch.no_grad():
        for n in range(-1, args.repeats):  # the first one warms up
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
    apart = float((values["ours"] - values["all logits"]).abs().max())
    ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["all logits"], strict=True))
    # Steadier than wall time on a machine that does other things as well.
    cpu_ratio = statistics.median(a / b for a, b in zip(cpu["ours"], cpu["all logits"], strict=True))
    memory = statistics.median(peaks["ours"]) / statistics.median(peaks["all logits"])
    outcome = {"benchmark": "log_prob_pass", "limits": [MEMORY, TIME], "memory": memory, "time": ratio}
    print(json.dumps(outcome | {"cpu_time": cpu_ratio, "apart": apart, "seconds": seconds, "peaks_mb": peaks}))
    print(
        f"log-probability pass, {args.tokens} tokens at {VOCAB:,} words / all logits: memory {memory:.3f} (at most "
        f"{MEMORY}), time {ratio:.2f} (at most {TIME}; CPU time {cpu_ratio:.2f})"
    )
    return int(ratio > TIME or memory > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
