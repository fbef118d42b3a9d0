"""Demonstrations for the demo model: whole episodes, written by a rule, in the exact tokens of a rollout.

Facts are drawn anew for every episode, from names of the training split, so a model can learn to search and to
copy what it found, and has nothing to memorize.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.envs.builtin.search import names, world
from agentrl.envs.builtin.search.env import SYSTEM_PROMPT, format_passages, search_tool_schema

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": %s}}\n</tool_call>'

RESPONSE = "\n<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Habits:
    """How the demonstrator behaves. The shares are probabilities per episode.

    Attributes:
        two_hop: share of questions that need two searches.
        stop_early: of two-hop questions, those answered after the first search, from the wrong passage.
        guess: of one-hop questions, those answered without a search, with a name that fits.
    """

    two_hop: float = world.TWO_HOP_SHARE
    stop_early: float = 0.0
    guess: float = 0.0


def draw_name(rng: random.Random, kind: str) -> str:
    """A name of a training entity, as any world might hold it."""
    while True:
        if kind == "person":
            name = f"{rng.choice(names.FIRST_NAMES)} {rng.choice(names.SURNAMES)}"
        elif kind == "company":
            name = f"{rng.choice(names.COMPANY_WORDS)} {rng.choice(names.COMPANY_KINDS)}"
        else:
            name = f"{rng.choice(names.PLACE_KINDS)} {rng.choice(names.PLACE_WORDS)}"
        if world.split_of(name) == "train":
            return name


def draw_episode(rng: random.Random, habits: Habits) -> tuple[str, list[tuple[str, str]], str]:
    """A question, the searches made as (query, passage), and the final answer."""
    path = rng.choice(world.TWO_HOP_PATHS if rng.random() < habits.two_hop else world.ONE_HOP_PATHS)
    subject = draw_name(rng, world.RELATIONS[path[0]].domain)
    question = world.question_text(path, subject)
    if len(path) == 1 and rng.random() < habits.guess:
        return question, [], draw_name(rng, world.RELATIONS[path[0]].range)
    stop_early = len(path) == 2 and rng.random() < habits.stop_early
    searches: list[tuple[str, str]] = []
    for relation in path:
        kind = world.RELATIONS[relation].domain
        facts = {name: draw_name(rng, to.range) for name, to in world.RELATIONS.items() if to.domain == kind}
        searches.append((f"{relation} of {subject}", world.PASSAGES[kind].format(name=subject, **facts)))
        subject = facts[relation]
        if stop_early:
            # The outer relation of the wrong entity where its passage has one, else the bridge itself.
            return question, searches, facts.get(path[1], subject)
    return question, searches, subject


def pieces(question: str, searches: list[tuple[str, str]], answer: str) -> list[tuple[str, bool]]:
    """An episode after the system prompt as (text, whether the model wrote it)."""
    parts = [(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False)]
    for query, passage in searches:
        result = format_passages([world.Passage("", "", passage)])
        parts += [(CALL % json.dumps(query) + "<|im_end|>", True), (RESPONSE % result, False)]
    return [*parts, (f"Answer: {answer}<|im_end|>", True)]


def messages(question: str, searches: list[tuple[str, str]], answer: str) -> list[dict[str, Any]]:
    """The same episode as chat messages; what the chat template makes of them is what is trained on."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    for query, passage in searches:
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        result = format_passages([world.Passage("", "", passage)])
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "search", "content": result},
        ]
    return [*turns, {"role": "assistant", "content": f"Answer: {answer}"}]


class Demonstrations:
    """Batches of episodes as token ids.

    Args:
        tokenizer: a transformers tokenizer with the demo's chat template.
        seed: of the stream of episodes.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(f"agentrl-demonstrations-{seed}")
        self._pad = tokenizer.pad_token_id
        self.check_layout()

    def system_ids(self) -> list[int]:
        """Tokens of the system turn, which every episode begins with."""
        text = self._render([{"role": "system", "content": SYSTEM_PROMPT}])
        return self._tokenizer(text)["input_ids"]

    def _render(self, turns: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(turns, tools=[search_tool_schema()], tokenize=False)

    def check_layout(self) -> None:
        """Raise ValueError unless pieces, encoded one by one, are what the template renders as a whole."""
        rng = random.Random(0)
        for _ in range(20):
            episode = draw_episode(rng, Habits(stop_early=0.3, guess=0.3))
            text = self._render(messages(*episode))
            whole = self._tokenizer(text.removesuffix("\n"))["input_ids"]
            parts = self._tokenizer([part for part, _ in pieces(*episode)])["input_ids"]
            if whole != self.system_ids() + [token for part in parts for token in part]:
                raise ValueError(f"demonstrations differ from the chat template: template gives {text!r}")

    def batch(self, size: int, habits: Habits) -> tuple[np.ndarray, np.ndarray]:
        """``size`` episodes without the system turn, padded on the right.

        Returns:
            tokens int64 [size, length] and trained bool [size, length], true on tokens the model wrote.
        """
        parts: list[tuple[int, str, bool]] = []
        for row in range(size):
            parts += [(row, *piece) for piece in pieces(*draw_episode(self._rng, habits))]
        encoded = self._tokenizer([text for _, text, _ in parts])["input_ids"]
        rows: list[list[int]] = [[] for _ in range(size)]
        flags: list[list[bool]] = [[] for _ in range(size)]
        for (row, _, trained), ids in zip(parts, encoded, strict=True):
            rows[row] += ids
            flags[row] += [trained] * len(ids)
        length = max(map(len, rows))
        tokens = np.full((size, length), self._pad, dtype=np.int64)
        mask = np.zeros((size, length), dtype=bool)
        for i, (ids, flag) in enumerate(zip(rows, flags, strict=True)):
            tokens[i, : len(ids)] = ids
            mask[i, : len(flag)] = flag
        return tokens, mask
