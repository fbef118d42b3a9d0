"""Problems with one whole number as their answer, hard by hand and a few lines of code.

Each kind draws its parameters, says the problem in words, and computes the answer from the parameters. The split of a
problem is a hash of its parameters, so no problem is in both sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from agentrl.envs.builtin.python import solutions
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


class Kind(NamedTuple):
    topic: str
    text: str
    draw: Callable[[Draw], Parameters]
    solve: Callable[..., int]


KINDS: dict[str, Kind] = {
    "prime_sum": Kind(
        "number theory",
        "What is the sum of all prime numbers from {low} to {high}?",
        lambda d: (lambda low: {"low": low, "high": low + d.sized((100, 300), (500, 2000), (2000, 9000))})(
            d.sized((10, 200), (200, 2000), (2000, 20000))
        ),
        solutions.prime_sum,
    ),
    "change": Kind(
        "combinatorics",
        "In how many ways can {amount} cents be paid with coins of {coins} cents, if there are enough of each coin "
        "and the order does not matter?",
        lambda d: {
            "amount": d.sized((20, 60), (80, 250), (300, 900)),
            "coins": d.some(d.sized(*[(3, 3), (4, 4), (5, 6)]), 1, 25),
        },
        solutions.change,
    ),
    "recurrence": Kind(
        "sequences",
        "A sequence starts with a(1) = {first} and a(2) = {second}; after that a(n) = {p} a(n-1) + {q} a(n-2) + {r}. "
        "What is the remainder of a({n}) when divided by {modulus}?",
        lambda d: {
            "first": d.number(1, 20),
            "second": d.number(1, 20),
            "p": d.number(2, 9),
            "q": d.number(1, 9),
            "r": d.number(1, 9),
            "n": d.sized((8, 20), (50, 400), (1000, 20000)),
            "modulus": d.sized((11, 99), (101, 9999), (10007, 999983)),
        },
        solutions.recurrence,
    ),
    "substrings": Kind(
        "strings",
        'How many different non-empty substrings does the text "{text}" have?',
        lambda d: {"text": d.text(d.sized((7, 12), (16, 28), (32, 48)), "abc")},
        solutions.substrings,
    ),
    "circle": Kind(
        "simulation",
        "People numbered 1 to {people} stand in a circle. Counting starts at 1, and every {step}th person leaves until "
        "one is left. Which number has the one that is left?",
        lambda d: {"people": d.sized((8, 30), (50, 400), (1000, 9000)), "step": d.number(4, 19)},
        solutions.circle,
    ),
    "last_digits": Kind(
        "number theory",
        "What is the remainder of {a}^{b} + {c}^{d} when divided by {modulus}?",
        lambda d: {
            **{name: d.sized((3, 20), (20, 200), (200, 5000)) for name in "ac"},
            **{name: d.sized((5, 30), (50, 500), (1000, 99999)) for name in "bd"},
            "modulus": d.sized((13, 99), (1001, 9999), (100003, 999983)),
        },
        solutions.last_digits,
    ),
    "lattice": Kind(
        "combinatorics",
        "A robot goes from (0, 0) to ({x}, {y}) in steps of one to the right or one up. It must not stand on any of "
        "the points {blocked}. How many ways are there?",
        lambda d: (
            lambda x, y: {
                "x": x,
                "y": y,
                "blocked": [[px, d.number(1, y - 1)] for px in d.some(d.sized((1, 2), (3, 4), (5, 6)), 1, x - 1)],
            }
        )(d.sized((4, 6), (7, 11), (12, 20)), d.sized((4, 6), (7, 11), (12, 20))),
        solutions.lattice,
    ),
    "collatz": Kind(
        "sequences",
        "From a whole number n one goes to n / 2 if n is even and to 3n + 1 if it is odd, until 1 is reached. Which of "
        "the numbers from {low} to {high} takes the most steps? Of several, give the smallest.",
        lambda d: (lambda low: {"low": low, "high": low + d.sized((10, 30), (100, 500), (1000, 3000))})(
            d.sized((2, 90), (100, 5000), (5000, 90000))
        ),
        solutions.collatz,
    ),
    "common": Kind(
        "strings",
        'How long is the longest common subsequence of "{first}" and "{second}"? (Letters keep their order '
        "and need not be next to each other.)",
        lambda d: {name: d.text(d.sized((6, 9), (14, 22), (28, 40)), "abcd") for name in ("first", "second")},
        solutions.common,
    ),
    "cells": Kind(
        "simulation",
        "{size} cells numbered 0 to {last} form a ring. At first the cells {alive} are alive. In each step a cell "
        "becomes alive if exactly one of its two neighbours was alive before, otherwise it is dead. How many cells are "
        "alive after {steps} steps?",
        lambda d: (
            lambda size: {
                "size": size,
                "last": size - 1,
                "alive": d.some(d.sized((2, 3), (3, 5), (4, 8)), 0, size - 1),
                "steps": d.sized((3, 6), (20, 90), (200, 900)),
            }
        )(d.sized((9, 13), (17, 31), (41, 79))),
        solutions.cells,
    ),
    "divisors": Kind(
        "number theory",
        "How many of the numbers from 1 to {high} have exactly {count} divisors?",
        lambda d: {"high": d.sized((30, 120), (300, 1500), (3000, 9000)), "count": 2 * d.number(2, 6)},
        solutions.divisors,
    ),
    "strings": Kind(
        "combinatorics",
        "How many texts of {length} letters from the first {letters} letters of the alphabet have no {run} equal "
        "letters in a row?",
        lambda d: {"length": d.sized((4, 7), (9, 14), (18, 30)), "letters": d.number(2, 5), "run": d.number(2, 4)},
        solutions.strings,
    ),
    "look_and_say": Kind(
        "sequences",
        "Reading a number aloud by its runs of equal digits gives the next one: 1, 11, 21, 1211 and so on. Starting "
        "with {start}, how many digits has the number after {steps} readings?",
        lambda d: {"start": d.number(10, 9999), "steps": d.sized((3, 6), (9, 13), (16, 22))},
        solutions.look_and_say,
    ),
    "cipher": Kind(
        "strings",
        'Every letter of "{text}" is moved {shift} places forward in the alphabet, after z comes a. How many vowels '
        "(a, e, i, o, u) does the result have?",
        lambda d: {
            "text": d.text(d.sized((8, 14), (20, 35), (45, 70)), "abcdefghijklmnopqrstuvwxyz"),
            "shift": d.number(3, 23),
        },
        solutions.cipher,
    ),
    "walk": Kind(
        "simulation",
        'A robot stands at (0, 0) and follows "{moves}": N, S, E and W are steps of one, R means that everything '
        "done so far is done once more. How many different points did it stand on, the first included?",
        lambda d: {"moves": d.text(d.sized((5, 8), (10, 14), (15, 20)), "NSEW") + "R" + d.text(3, "NSEW") + "R"},
        solutions.walk,
    ),
}
"""By name; those of one topic lie apart, so that few tasks in a row hold all topics."""


def makers(levels: tuple[str, ...], topics: tuple[str, ...] | None = None) -> dict[str, Make]:
    """Generators of the problems of these levels and topics; see :class:`~agentrl.tasks.generated.GeneratedTasks`."""
    return {
        f"{name}-{level}": _maker(kind, level)
        for name, kind in KINDS.items()
        for level in levels
        if topics is None or kind.topic in topics
    }


def _maker(kind: Kind, level: str) -> Make:
    def make(rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
        parameters = kind.draw(Draw(rng, level))
        row = {
            "prompt": kind.text.format(**{name: _said(value) for name, value in parameters.items()}),
            "answer": str(kind.solve(**parameters)),
            "category": kind.topic,
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
