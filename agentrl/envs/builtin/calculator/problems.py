"""Word problems in three levels: one operation with small numbers, two, three with large ones.

A problem is a story with places for numbers, and the expression that solves it. Stories of the training and the test
set have other people and other things, and no expression is in both sets.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from agentrl.tasks.generated import LEVELS, Make

PEOPLE = {
    "train": ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Karl", "Lena"),
    "test": ("Maria", "Noah", "Olga", "Paul", "Rosa", "Simon", "Tina", "Victor"),
}
THINGS = {
    "train": ("apples", "books", "coins", "stamps", "pens", "cards", "eggs", "marbles", "shells", "bolts"),
    "test": ("pears", "tickets", "beads", "photos", "nails", "stickers"),
}


class Story(NamedTuple):
    """``text`` has {who}, {what} and {a} to {d}, which ``draw`` draws; ``expression`` and ``value`` are the solution,
    once as text and once computed, so that no text is ever evaluated."""

    text: str
    expression: str
    value: Callable[..., Fraction | int]
    draw: Callable[[Callable[[int, int], int]], dict[str, int]]


def _between(**ranges: tuple[int, int]) -> Callable[[Callable[[int, int], int]], dict[str, int]]:
    return lambda pick: {name: pick(*bounds) for name, bounds in ranges.items()}


def _descending(**ranges: tuple[int, int]) -> Callable[[Callable[[int, int], int]], dict[str, int]]:
    """The same, the first number the largest."""

    def draw(pick: Callable[[int, int], int]) -> dict[str, int]:
        numbers = {name: pick(*bounds) for name, bounds in ranges.items()}
        first, *rest = numbers
        return {first: numbers[first] + sum(numbers[name] for name in rest), **{name: numbers[name] for name in rest}}

    return draw


def _shared(pick: Callable[[int, int], int]) -> dict[str, int]:
    each, among = pick(3, 60), pick(3, 12)
    return {"a": each * among, "b": among}


def _gathered_and_shared(pick: Callable[[int, int], int]) -> dict[str, int]:
    each, among = pick(12, 90), pick(3, 15)
    first = pick(1, each * among - 1)
    return {"a": first, "b": each * among - first, "c": among}


def _trip(pick: Callable[[int, int], int]) -> dict[str, int]:
    speed, first, second = pick(20, 110), pick(2, 9), pick(2, 9)
    way = pick(first * 10, speed * (first + second) - 10)
    return {"a": way, "b": first, "c": speed * (first + second) - way, "d": second}


STORIES: dict[str, tuple[Story, ...]] = {
    "easy": (
        Story(
            "{who} has {a} {what} and gets {b} more. How many now?",
            "{a} + {b}",
            lambda a, b: a + b,
            _between(a=(11, 99), b=(11, 99)),
        ),
        Story(
            "{who} had {a} {what} and gave {b} away. How many are left?",
            "{a} - {b}",
            lambda a, b: a - b,
            _descending(a=(5, 99), b=(5, 99)),
        ),
        Story(
            "{who} has {a} bags of {b} {what}. How many in all?",
            "{a} * {b}",
            lambda a, b: a * b,
            _between(a=(3, 25), b=(6, 49)),
        ),
        Story(
            "{who} shares {a} {what} among {b} friends. How many has each?",
            "{a} / {b}",
            lambda a, b: Fraction(a, b),
            _shared,
        ),
    ),
    "medium": (
        Story(
            "{who} buys {a} boxes of {b} {what} and loses {c}. How many are left?",
            "{a} * {b} - {c}",
            lambda a, b, c: a * b - c,
            _between(a=(12, 60), b=(12, 90), c=(11, 99)),
        ),
        Story(
            "{who} has {a} {what}, finds {b} more and shares all among {c} friends. How many has each?",
            "({a} + {b}) / {c}",
            lambda a, b, c: Fraction(a + b, c),
            _gathered_and_shared,
        ),
        Story(
            "{who} had {a} {what}, sold {b} and then {c}. How many are left?",
            "{a} - {b} - {c}",
            lambda a, b, c: a - b - c,
            _descending(a=(100, 900), b=(100, 900), c=(100, 900)),
        ),
        Story(
            "{who} puts {a} {what} into each of {b} bags and {c} into a box. How many in all?",
            "{a} * {b} + {c}",
            lambda a, b, c: a * b + c,
            _between(a=(12, 90), b=(12, 60), c=(100, 999)),
        ),
    ),
    "hard": (
        Story(
            "{who} buys {a} {what} for {b} dollars each, gets {c} percent off and pays {d} dollars to have them sent. "
            "How many dollars is that?",
            "{a} * {b} * (100 - {c}) / 100 + {d}",
            lambda a, b, c, d: Fraction(a * b * (100 - c), 100) + d,
            lambda pick: {"a": pick(12, 400), "b": pick(3, 250), "c": 5 * pick(1, 15), "d": pick(5, 95)},
        ),
        Story(
            "{who} drives {a} km in {b} hours, then {c} km in {d} hours. How many km an hour is that on average?",
            "({a} + {c}) / ({b} + {d})",
            lambda a, b, c, d: Fraction(a + c, b + d),
            _trip,
        ),
        Story(
            "{a} workers make {b} {what} a day each. After {c} days {d} are broken. How many are whole?",
            "{a} * {b} * {c} - {d}",
            lambda a, b, c, d: a * b * c - d,
            _between(a=(12, 80), b=(12, 150), c=(6, 60), d=(50, 800)),
        ),
        Story(
            "{who} has {a} sheets of {b} {what} and {c} sheets of {d}. How many in all?",
            "{a} * {b} + {c} * {d}",
            lambda a, b, c, d: a * b + c * d,
            _between(a=(101, 990), b=(12, 96), c=(101, 990), d=(12, 96)),
        ),
    ),
}


def makers(levels: tuple[str, ...], split: str) -> dict[str, Make]:
    """Generators of the stories of these levels, easy ones first; see :class:`GeneratedTasks`."""
    stories = [(level, number, story) for level in levels for number, story in enumerate(STORIES[level], start=1)]
    # Levels take turns, so that the first few tasks hold all of them.
    stories.sort(key=lambda found: (found[1], LEVELS.index(found[0])))
    return {f"{level}-{number}": _maker(level, story, split) for level, number, story in stories}


def _maker(level: str, story: Story, split: str) -> Make:
    def make(rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
        numbers = story.draw(lambda low, high: int(rng.integers(low, high + 1)))
        who, what = str(rng.choice(PEOPLE[split])), str(rng.choice(THINGS[split]))
        expression = story.expression.format(**numbers)
        answer = _shown(story.value(**numbers))
        text = story.text.format(who=who, what=what, **numbers)
        return expression, {"prompt": text, "answer": answer, "expression": expression, "category": level}

    return make


def _shown(value: Fraction | int) -> str:
    """Exact, since a percentage of whole dollars has at most two decimals."""
    return str(value) if Fraction(value).denominator == 1 else f"{float(value):.2f}"
