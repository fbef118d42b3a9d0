"""Make the demo model: ``python -m envs_examples.demo_model.build --seed 0 --out DIR``.

A 1 M-parameter Qwen3 is trained from nothing in three phases: copying of random words (without it a model this
small does not learn to copy from its context in reasonable time), right demonstrations, then
demonstrations with bad habits. The result knows how to search and to copy, and does it wrong: it mostly
answers two-hop questions after one search. Reinforcement learning has the habits to change, not the skills.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.envs.builtin.search import names
from envs_examples.demo_model.demonstrations import Demonstrations, Habits
from envs_examples.demo_model.tokenizer import VOCAB_SIZE, save_tokenizer

MODEL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
"""Sizes of the Qwen3 architecture: 0.98 M parameters."""


@dataclass(frozen=True)
class Phase:
    """One stretch of training: ``steps`` batches at a cosine rate from ``lr`` down to ``lr * final``."""

    name: str
    steps: int
    lr: float
    batch: int = 64
    final: float = 0.1
    habits: Habits | None = None  # None: copying of random words


@dataclass(frozen=True)
class Recipe:
    """What the shipped checkpoint was made with."""

    phases: tuple[Phase, ...] = (
        Phase("copy", 200, 2e-3, batch=32, final=1.0),
        Phase("skill", 1000, 2e-3, batch=16, habits=Habits(two_hop=0.8)),
        Phase("habit", 150, 3e-4, batch=24, habits=Habits(stop_early=0.72, guess=0.1)),
    )
    copy_length: int = 32
    measured_tasks: int = 256  # held-out questions played after each phase of demonstrations
    weight_decay: float = 0.01
    clip: float = 1.0
    betas: tuple[float, float] = field(default=(0.9, 0.98))


def new_model(tokenizer: Any, seed: int) -> Any:
    """A freshly initialized fp32 model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    stop = tokenizer.eos_token_id
    sizes: dict[str, Any] = MODEL
    config = Qwen3Config(**sizes, eos_token_id=stop, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    return Qwen3ForCausalLM(config).float()


def copy_batches(tokenizer: Any, size: int, length: int, generator: Any) -> Iterator[tuple[Any, Any]]:
    """Sequences of random words, each said twice; the second time is trained. Tensors [size, 2 * length]."""
    import torch

    words = torch.tensor([tokenizer.convert_tokens_to_ids("Ġ" + word) for word in names.WORLD_WORDS])
    trained = torch.zeros(size, 2 * length, dtype=torch.bool)
    trained[:, length + 1 :] = True
    while True:
        once = words[torch.randint(len(words), (size, length), generator=generator)]
        yield torch.cat([once, once], dim=1), trained


def loss_of(model: Any, tokens: Any, trained: Any, prefix: Any | None) -> Any:
    """Mean cross-entropy of the trained tokens. The shared prefix is computed once for the whole batch."""
    import torch
    from transformers import DynamicCache

    cache = None
    if prefix is not None:
        cache = DynamicCache()
        model.model(prefix, past_key_values=cache, use_cache=True)
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys = layer.keys.expand(len(tokens), -1, -1, -1)
            layer.values = layer.values.expand(len(tokens), -1, -1, -1)
    hidden = model.model(tokens, past_key_values=cache, use_cache=cache is not None).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][trained[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:][trained[:, 1:]])


def train_phase(model: Any, tokenizer: Any, phase: Phase, recipe: Recipe, seed: int) -> float:
    """Run one phase; returns the mean loss of its last 20 steps."""
    import torch

    prefix = None
    if phase.habits is None:
        generator = torch.Generator().manual_seed(seed)
        batches = copy_batches(tokenizer, phase.batch, recipe.copy_length, generator)
    else:
        source = Demonstrations(tokenizer, seed)
        prefix = torch.tensor([source.system_ids()])
        made = (source.batch(phase.batch, phase.habits) for _ in range(phase.steps))
        batches = ((torch.from_numpy(tokens), torch.from_numpy(trained)) for tokens, trained in made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, betas=recipe.betas, weight_decay=recipe.weight_decay)
    losses: list[float] = []
    begin = time.monotonic()
    model.train()
    for step, (tokens, trained) in zip(range(phase.steps), batches, strict=False):
        shape = phase.final + (1 - phase.final) * (1 + math.cos(math.pi * step / phase.steps)) / 2
        optimizer.param_groups[0]["lr"] = phase.lr * shape * min(1.0, (step + 1) / 30)
        loss = loss_of(model, tokens, trained, prefix)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49 or step + 1 == phase.steps:
            recent = sum(losses[-20:]) / len(losses[-20:])
            seconds = time.monotonic() - begin
            print(f"{phase.name} {step + 1}/{phase.steps} loss {recent:.4f} {seconds:.0f} s", flush=True)
    return sum(losses[-20:]) / max(1, len(losses[-20:]))


def save_model(model: Any, directory: Path) -> None:
    """Write config, generation config and bf16 weights."""
    import torch

    model.config.dtype = torch.bfloat16
    clone = type(model)(model.config).to(torch.bfloat16)
    clone.load_state_dict(model.state_dict())
    clone.generation_config.eos_token_id = [model.config.eos_token_id, model.config.pad_token_id]
    clone.generation_config.pad_token_id = model.config.pad_token_id
    clone.save_pretrained(directory, safe_serialization=True)


def measure(model: Any, tokenizer: Any, *, tasks: int) -> dict[str, dict[str, float]]:
    """Success on held-out questions, greedy and at temperature 1, of the weights as they are saved."""
    import torch

    from envs_examples.demo_model.rehearsal import rehearse, success_rates

    rounded = copy.deepcopy(model).to(torch.bfloat16).float().eval()
    torch.manual_seed(0)
    return {
        name: success_rates(rehearse(rounded, tokenizer, list(range(tasks)), temperature=temperature))
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0))
    }


def build(out: Path, seed: int, recipe: Recipe) -> dict[str, Any]:
    """Train and save the demo model into ``out``; returns the record that is written beside it."""
    from transformers import AutoTokenizer

    save_tokenizer(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = new_model(tokenizer, seed)
    record: dict[str, Any] = {"seed": seed, "recipe": json.loads(json.dumps(asdict(recipe))), "held_out": {}}
    for number, phase in enumerate(recipe.phases):
        train_phase(model, tokenizer, phase, recipe, seed * 100 + number)
        if phase.habits is not None:
            record["held_out"][phase.name] = measure(model, tokenizer, tasks=recipe.measured_tasks)
            print(phase.name, json.dumps(record["held_out"][phase.name]), flush=True)
    save_model(model, out)
    (out / "build.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def main(argv: list[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of weights, words and demonstrations")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(args.threads)
    print(json.dumps(build(args.out, args.seed, Recipe()), indent=1))


if __name__ == "__main__":
    main()
