"""Episodes of the demo model with transformers alone, to measure a checkpoint while it is made.

Training and evaluation proper go through the engine; this is the yardstick of :mod:`envs_examples.demo_model.build`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl.envs.builtin.search.env import SearchEnv
from envs_examples.demo_model.demonstrations import RESPONSE


@dataclass
class Episode:
    """One rehearsed episode. ``tokens`` holds everything the model saw and wrote."""

    env: SearchEnv
    hops: int
    tokens: list[int]
    trained: list[int] = field(default_factory=list)
    searches: int = 0
    reward: float = 0.0
    done: bool = False


def rehearse(
    model: Any,
    tokenizer: Any,
    indices: list[int],
    *,
    split: str = "test",
    temperature: float = 0.0,
    max_turns: int = 4,
    max_new_tokens: int = 40,
) -> list[Episode]:
    """Play the questions ``indices`` of ``split`` to their end, all at once.

    Args:
        model: a causal LM of transformers.
        tokenizer: with the demo's chat template.
        indices: which questions; repeat one to sample it several times.
        split: which split.
        temperature: 0 is greedy.
        max_turns: model turns an episode may take.
        max_new_tokens: tokens a turn may take.
    """
    episodes = [_start(tokenizer, split, index) for index in indices]
    for _ in range(max_turns):
        active = [episode for episode in episodes if not episode.done]
        if not active:
            break
        turns = _generate(model, tokenizer, [e.tokens for e in active], temperature, max_new_tokens)
        for episode, turn in zip(active, turns, strict=True):
            _advance(tokenizer, episode, turn)
    return episodes


def success_rates(episodes: list[Episode]) -> dict[str, float]:
    """Mean reward over all episodes and by number of hops, and searches an episode."""
    rates = {"all": _mean([e.reward for e in episodes])}
    for hops in sorted({e.hops for e in episodes}):
        rates[f"{hops}-hop"] = _mean([e.reward for e in episodes if e.hops == hops])
    rates["searches"] = _mean([e.searches for e in episodes])
    rates["tokens"] = _mean([len(e.tokens) for e in episodes])
    return {name: round(value, 3) for name, value in rates.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _start(tokenizer: Any, split: str, index: int) -> Episode:
    env = SearchEnv()
    _, info = env.reset(options={"split": split, "index": index})
    text = tokenizer.apply_chat_template(
        info["messages"], tools=info["tools"], add_generation_prompt=True, tokenize=False
    )
    tokens = tokenizer(text)["input_ids"]
    return Episode(env, env.row["hops"], tokens, [0] * len(tokens))


def _advance(tokenizer: Any, episode: Episode, turn: list[int]) -> None:
    episode.tokens += turn
    episode.trained += [1] * len(turn)
    text = tokenizer.decode([t for t in turn if t != tokenizer.eos_token_id])
    _, reward, terminated, truncated, info = episode.env.step(text)
    episode.reward += reward
    episode.searches += len(info.get("tool_calls", []))
    episode.done = terminated or truncated or turn[-1:] != [tokenizer.eos_token_id]
    if not episode.done:
        result = "\n".join(message["content"] for message in info["messages"])
        extension = tokenizer(RESPONSE % result)["input_ids"]
        episode.tokens += extension
        episode.trained += [0] * len(extension)


def _generate(model: Any, tokenizer: Any, prompts: list[list[int]], temperature: float, limit: int) -> list[list[int]]:
    import torch

    width = max(map(len, prompts))
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=limit, eos_token_id=eos, pad_token_id=pad, **sampling
        )[:, width:].tolist()
    return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in out]
