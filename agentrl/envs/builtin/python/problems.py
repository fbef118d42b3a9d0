"""Problems with one whole number as their answer, hard by hand and a few lines of code.

Each kind draws its parameters, says the problem in words, and computes the answer from the parameters. The split of a
problem is a hash of its parameters, so no problem is in both sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from agentrl.envs.builtin.python import solutions
from agentrl.loading import toml_beside
from agentrl.tasks.generated import LEVELS, Make

Parameters = dict[str, Any]


class Draw:
    """Draws parameters, larger ones at higher levels."""

    def __init__(self, rng: np.random.Generator, level: str) -> None:
        self._rng = rng
        self._level = LEVELS.index(level)

    def number(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def sized(self, *ranges: tuple[int, int]) -> int:
        """A number from the range of the level."""
        return self.number(*ranges[self._level])

    def some(self, count: int, low: int, high: int) -> list[int]:
        """Different numbers, ascending."""
        return sorted(int(n) for n in self._rng.choice(np.arange(low, high + 1), size=count, replace=False))

    def text(self, length: int, letters: str) -> str:
        return "".join(self._rng.choice(list(letters), size=length))


KINDS: dict[str, dict[str, str]] = toml_beside(__file__, "kinds.toml")
"""``topic`` and ``text`` of a problem by its kind."""
DRAWS: dict[str, Callable[[Draw], Parameters]] = {
    "prime_sum": lambda d: {
        "low": (low := d.sized((10, 200), (200, 2000), (2000, 20000))),
        "high": low + d.sized((100, 300), (500, 2000), (2000, 9000)),
    },
    "change": lambda d: {
        "amount": d.sized((20, 60), (80, 250), (300, 900)),
        "coins": d.some(d.sized(*[(3, 3), (4, 4), (5, 6)]), 1, 25),
    },
    "recurrence": lambda d: {
        "first": d.number(1, 20),
        "second": d.number(1, 20),
        "p": d.number(2, 9),
        "q": d.number(1, 9),
        "r": d.number(1, 9),
        "n": d.sized((8, 20), (50, 400), (1000, 20000)),
        "modulus": d.sized((11, 99), (101, 9999), (10007, 999983)),
    },
    "substrings": lambda d: {"text": d.text(d.sized((7, 12), (16, 28), (32, 48)), "abc")},
    "circle": lambda d: {"people": d.sized((8, 30), (50, 400), (1000, 9000)), "step": d.number(4, 19)},
    "last_digits": lambda d: {
        **{name: d.sized((3, 20), (20, 200), (200, 5000)) for name in "ac"},
        **{name: d.sized((5, 30), (50, 500), (1000, 99999)) for name in "bd"},
        "modulus": d.sized((13, 99), (1001, 9999), (100003, 999983)),
    },
    "lattice": lambda d: {
        "x": (x := d.sized((4, 6), (7, 11), (12, 20))),
        "y": (y := d.sized((4, 6), (7, 11), (12, 20))),
        "blocked": [[px, d.number(1, y - 1)] for px in d.some(d.sized((1, 2), (3, 4), (5, 6)), 1, x - 1)],
    },
    "collatz": lambda d: {
        "low": (low := d.sized((2, 90), (100, 5000), (5000, 90000))),
        "high": low + d.sized((10, 30), (100, 500), (1000, 3000)),
    },
    "common": lambda d: {name: d.text(d.sized((6, 9), (14, 22), (28, 40)), "abcd") for name in ("first", "second")},
    "cells": lambda d: {
        "size": (size := d.sized((9, 13), (17, 31), (41, 79))),
        "last": size - 1,
        "alive": d.some(d.sized((2, 3), (3, 5), (4, 8)), 0, size - 1),
        "steps": d.sized((3, 6), (20, 90), (200, 900)),
    },
    "divisors": lambda d: {"high": d.sized((30, 120), (300, 1500), (3000, 9000)), "count": 2 * d.number(2, 6)},
    "strings": lambda d: {
        "length": d.sized((4, 7), (9, 14), (18, 30)),
        "letters": d.number(2, 5),
        "run": d.number(2, 4),
    },
    "look_and_say": lambda d: {"start": d.number(10, 9999), "steps": d.sized((3, 6), (9, 13), (16, 22))},
    "cipher": lambda d: {
        "text": d.text(d.sized((8, 14), (20, 35), (45, 70)), "abcdefghijklmnopqrstuvwxyz"),
        "shift": d.number(3, 23),
    },
    "walk": lambda d: {"moves": d.text(d.sized((5, 8), (10, 14), (15, 20)), "NSEW") + "R" + d.text(3, "NSEW") + "R"},
}
"""Parameters of a problem by its kind."""


def makers(levels: tuple[str, ...], topics: tuple[str, ...]) -> dict[str, Make]:
    """Generators of the problems of these levels and topics; see :class:`~agentrl.tasks.generated.GeneratedTasks`."""
    return {
        f"{name}-{level}": _maker(name, level)
        for name, kind in KINDS.items()
        for level in levels
        if kind["topic"] in topics
    }


def _maker(name: str, level: str) -> Make:
    def make(rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
        parameters = DRAWS[name](Draw(rng, level))
        row = {
            "prompt": KINDS[name]["text"].format(**{part: _said(value) for part, value in parameters.items()}),
            "answer": str(getattr(solutions, name)(**parameters)),
            "category": KINDS[name]["topic"],
            "level": level,
            "parameters": parameters,
        }
        return parameters, row

    return make


def _said(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    words = [f"({', '.join(map(str, item))})" if isinstance(item, list) else str(item) for item in value]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
