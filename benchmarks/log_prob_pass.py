"""The log-probability pass at a real vocabulary against the way with all logits, in one run: peak memory and time.

All logits: ``(hidden @ weight.T).log_softmax(-1)`` and the target's entry, without gradients, float32. Peak memory is
that of the process above what it had before. Both ways by turns. Prints a line per repeat and, last, one JSON object.
Exits 1 when ours takes more than the limits. The other way takes 5 GB.

    python benchmarks/log_prob_pass.py [--threads 2] [--repeats 3] [--tokens 4096] [--hidden 512]
"""

from __future__ import annotations

import json
import sys

from log_probs import VOCAB, compare, settings

MEMORY, TIME = 0.1, 1.1


def main() -> int:
    args = settings(__doc__, repeats=3, tokens=4096)
    import torch

    from agentrl.trainer.megatron.log_probs import VocabShard, log_probs

    hidden, weight = torch.randn(args.tokens, args.hidden).mul_(0.1), torch.randn(VOCAB, args.hidden).mul_(0.1)
    targets = torch.randint(0, VOCAB, (args.tokens,))
    ways = {
        "ours": lambda: log_probs(hidden, weight, targets, VocabShard(0, VOCAB))[0],
        "all logits": lambda: (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1),
    }
    with torch.no_grad():
        outcome = compare(ways, args.repeats)
    ratio, memory = outcome["ratio"], outcome["memory_ratio"]
    print(json.dumps({"benchmark": "log_prob_pass", "limits": [MEMORY, TIME]} | outcome))
    print(
        f"log-probability pass, {args.tokens} tokens at {VOCAB:,} words / all logits: memory {memory:.3f} (at most "
        f"{MEMORY}), time {ratio:.2f} (at most {TIME}; CPU time {outcome['cpu_ratio']:.2f})"
    )
    return int(ratio > TIME or memory > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
