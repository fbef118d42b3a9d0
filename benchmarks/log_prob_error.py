"""How far float32 log-probabilities are from float64 at a real vocabulary: the trainer's, and those of torch's softmax.

SmolLM2 (49,152 words) writes a story with transformers; each sampled token's log-probability is then computed from
the same hidden states in float32, by the trainer's function, by ``log_softmax`` and by the logarithm of ``softmax``,
which is what SGLang's sampler takes, and compared with the float64 log-softmax of the same float32 logits::

    python benchmarks/log_prob_error.py [--tokens 200]

Exits 1 when the trainer's mean error is above 1e-6 nats.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from agentrl.demo.smollm2 import fetch
from agentrl.trainer.megatron.log_probs import VocabShard, log_probs

LIMIT = 1e-6


@torch.no_grad()
def measure(tokens: int) -> dict[str, dict[str, float]]:
    """Signed and absolute mean error in nats, and the share that is too high, of each way."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell me a story about a dog."}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    )["input_ids"]  # fmt: skip
    torch.manual_seed(0)
    ids = model.generate(prompt, max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0)
    start = prompt.shape[1]
    hidden, targets = model.model(ids).last_hidden_state[0, start - 1 : -1], ids[0, start:]
    weight = model.lm_head.weight
    logits = hidden @ weight.t()

    def picked(table: torch.Tensor) -> torch.Tensor:
        return table.gather(1, targets[:, None])[:, 0]

    ways = {
        "trainer": log_probs(hidden, weight, targets, VocabShard(0, len(weight)))[0],
        "log_softmax": picked(logits.log_softmax(-1)),
        "log of softmax": picked(logits.softmax(-1).log()),
    }
    exact = picked(logits.double().log_softmax(-1))
    errors = {name: values.double() - exact for name, values in ways.items()}
    return {
        name: {"mean": e.mean().item(), "mean_abs": e.abs().mean().item(), "high": (e > 0).double().mean().item()}
        for name, e in errors.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    result = measure(parser.parse_args().tokens)
    print(json.dumps({"benchmark": "log_prob_error", **result}))
    words = "; ".join(
        f"{name} {e['mean']:+.1e} (absolute {e['mean_abs']:.1e}, {e['high']:.0%} too high)"
        for name, e in result.items()
    )
    print(f"mean error of a log-probability, in nats: {words}; target of the trainer: absolute at most {LIMIT:g}")
    return int(result["trainer"]["mean_abs"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
