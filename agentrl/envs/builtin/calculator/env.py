"""``CalculatorEnv``: arithmetic word problems with a calculator tool."""

from __future__ import annotations

from pathlib import Path

from agentrl.envs.builtin.calculator.problems import makers
from agentrl.envs.tool_env import ToolEnv
from agentrl.rewards import math_answer
from agentrl.tasks.generated import LEVELS, GeneratedTasks, own_tasks
from agentrl.tools.builtin.calculator import CalculatorTool
from agentrl.values import chosen

SYSTEM_PROMPT = "Use the calculator, then reply with Answer: and the number."
"""Short, because every episode begins with it."""


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
