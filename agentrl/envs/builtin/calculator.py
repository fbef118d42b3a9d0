"""``CalculatorEnv``: arithmetic word problems with a calculator tool.

Stories of the training and the test set have other people and other things, and no expression is in both sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agentrl.envs.tool_env import ToolEnv
from agentrl.loading import toml_beside
from agentrl.rewards import math_answer
from agentrl.tasks.generated import LEVELS, GeneratedTasks, Make, own_tasks
from agentrl.tools.builtin.calculator import CalculatorTool, evaluate
from agentrl.values import chosen

SYSTEM_PROMPT = "Use the calculator, then reply with Answer: and the number."
"""Short, because every episode begins with it."""
STORIES = toml_beside(__file__, "calculator.toml")
PEOPLE, THINGS = STORIES["people"], STORIES["things"]


class CalculatorEnv(ToolEnv):
    r"""Word problems of one to three operations; the model computes with the tool and answers with a number.

    A turn without a call is the final answer. The reward is 1 when the last number of that turn (or what is in its
    last ``\boxed{}``) has the value of the answer, else 0. Only what the model wrote is read.

    Args:
        difficulty: ``easy`` (one operation, mostly numbers below 100), ``medium`` (two), ``hard`` (three or four,
            large numbers, percentages); several joined by ``+`` take turns.
        task_seed: another seed, other problems.
        train_data: problems to train on instead, in any form that :func:`agentrl.load_tasks` takes.
        test_data: held-out problems; needed when ``train_data`` is given.
        input_key: column of the problem in these.
        label_key: column of the answer in these.

    Raises:
        ConfigError: an argument is out of range.
        DataError: a file cannot be used; file and line are named.

    Example:
        >>> env = CalculatorEnv(difficulty="easy")
        >>> env.reset(options={"split": "test", "index": 0})[0]
        'Simon has 78 stickers and gets 11 more. How many now?'
        >>> env.step('<tool_call>{"name": "calculator", "arguments": {"expression": "78 + 11"}}</tool_call>')[0]
        '89'
        >>> env.step("Answer: 89")[1:3]
        (1.0, True)
    """

    max_turns = 6
    system_prompt = SYSTEM_PROMPT
    tools = [CalculatorTool]

    def __init__(
        self,
        *,
        difficulty: str = "easy+medium+hard",
        task_seed: int = 0,
        train_data: str | Path | None = None,
        test_data: str | Path | None = None,
        input_key: str = "prompt",
        label_key: str = "label",
    ) -> None:
        levels = chosen("difficulty", difficulty, LEVELS)
        if train_data or test_data:
            self.tasks = own_tasks(train_data, test_data, input_key, label_key)
        else:
            self.tasks = {
                split: GeneratedTasks("calculator", makers(levels, split), split, task_seed) for split in self.splits
            }

    def reward(self, text: str, answer: str) -> dict[str, float]:
        """1.0 for the right number, else 0.0."""
        return {"correct": math_answer(text, answer)}


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
