"""Word problems in three levels: one operation with small numbers, two, three with large ones.

Stories of the training and the test set have other people and other things, and no expression is in both sets.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.tasks.generated import LEVELS, Make
from agentrl.tools.builtin.calculator import evaluate

STORIES = tomllib.loads(Path(__file__).with_name("stories.toml").read_text(encoding="utf-8"))
PEOPLE, THINGS = STORIES["people"], STORIES["things"]


def makers(levels: tuple[str, ...], split: str) -> dict[str, Make]:
    """Generators of the stories of these levels, easy ones first; see :class:`GeneratedTasks`."""
    stories = [(level, number, story) for level in levels for number, story in enumerate(STORIES[level], start=1)]
    # Levels take turns, so that the first few tasks hold all of them.
    stories.sort(key=lambda found: (found[1], LEVELS.index(found[0])))
    return {f"{level}-{number}": _maker(level, story, split) for level, number, story in stories}


def _maker(level: str, story: dict[str, Any], split: str) -> Make:
    def make(rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
        numbers: dict[str, int] = {}

        def whole(given: int | str) -> int:
            return given if isinstance(given, int) else int(evaluate(given.format(**numbers)))

        for name, given in story["numbers"].items():
            drawn = isinstance(given, list)
            numbers[name] = int(rng.integers(whole(given[0]), whole(given[1]) + 1)) if drawn else whole(given)
        who, what = str(rng.choice(PEOPLE[split])), str(rng.choice(THINGS[split]))
        expression = story["solution"].format(**numbers)
        value = evaluate(expression)
        # Exact, since a percentage of whole dollars has at most two decimals.
        answer = str(int(value)) if value == int(value) else f"{float(value):.2f}"
        text = story["text"].format(who=who, what=what, **numbers)
        return expression, {"prompt": text, "answer": answer, "expression": expression, "category": level}

    return make
