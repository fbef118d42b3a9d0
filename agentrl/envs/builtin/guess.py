"""``GuessEnv``: find a number in three guesses, told after each where it lies. Small enough for a small model."""

from __future__ import annotations

import functools
import re
import zlib
from typing import Any

from agentrl.envs.core import Env, task_index

NUMBERS = 7
"""Numbers among which one is meant: as many as three guesses can tell apart."""
EXAMPLE = (
    {"role": "system", "content": "Guess my number."},
    {"role": "user", "content": "From 50 to 56."},
    {"role": "assistant", "content": "53"},
    {"role": "user", "content": "Lower: 50 to 52."},
    {"role": "assistant", "content": "51"},
)
"""A game that was won stands before each, and shows how to answer."""


class GuessEnv(Env):
    """A number of two digits is guessed by *higher* and *lower*.

    The first observation names seven numbers in a row, one of which is meant. After a wrong guess the next
    observation says where it lies. A reply without exactly one of the numbers named last is a guess lost. Always the
    middle finds every number in ``max_turns`` guesses (3). The category of a task is how many of them that takes.

    The last guess earns 1 if it is right, else half the share of the other numbers that were ruled out by then: a
    model that hardly ever wins still learns from what it does.

    The row begins at 10 to 93. A quarter of these beginnings is only in ``test``, the others only in ``train``.

    Example:
        >>> env = GuessEnv()
        >>> env.reset(options={"split": "test", "index": 0})[0]
        'Right! From 75 to 81.'
        >>> env.step("78")[0]
        'Lower: 75 to 77.'
        >>> env.step("I do not know.")[0]
        'From 75 to 77.'
    """

    max_turns = 3
    call_format = "none"
    example_actions = ("15", "No idea.")

    def num_tasks(self, split: str) -> int:
        return len(tasks(self.split_of({"split": split})))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        split = self.split_of(options)
        index = task_index(self, split, options)
        self.low, self.number = tasks(split)[index]
        self.high = self.low + NUMBERS - 1
        self.guesses = 0
        observation = f"Right! From {self.low} to {self.high}."
        messages = [*map(dict, EXAMPLE), {"role": "user", "content": observation}]
        place = self.number - self.low
        category = "guesses: " + ("1" if place == 3 else "2" if place in (1, 5) else "3")
        return observation, {"messages": messages, "task_id": f"{split}/{index}", "category": category}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        words = re.findall(r"[0-9]+", action)
        guess = int(words[0][:4]) if len(words) == 1 else -1
        if guess == self.number:
            return "", 1.0, True, False, {"success": True}
        side = ""
        if self.low <= guess < self.number:
            self.low, side = guess + 1, "Higher: "
        elif self.number < guess <= self.high:
            self.high, side = guess - 1, "Lower: "
        left = f"{self.low} to {self.high}."
        self.guesses += 1
        ruled_out = 1 - (self.high - self.low) / (NUMBERS - 1)
        reward = 0.5 * ruled_out if self.guesses >= self.max_turns else 0.0
        return f"{side}{left}" if side else f"From {left}", reward, False, False, {}


@functools.cache
def tasks(split: str) -> tuple[tuple[int, int], ...]:
    """The first of the seven numbers and the one that is meant, in an order without a pattern."""
    pairs = [
        (low, low + offset)
        for low in range(10, 101 - NUMBERS)
        for offset in range(NUMBERS)
        if (zlib.crc32(b"%d" % low) % 4 == 0) == (split == "test")
    ]
    return tuple(sorted(pairs, key=lambda pair: zlib.crc32(b"%d %d" % pair)))
