"""``PythonEnv``: problems that the model solves by writing and running Python, in as many turns as it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.envs.builtin.python.problems import KINDS, makers
from agentrl.envs.core import require_number
from agentrl.envs.tool_env import ToolEnv
from agentrl.rewards import math_answer
from agentrl.tasks.generated import LEVELS, GeneratedTasks, own_tasks
from agentrl.tools.builtin.python import PythonTool
from agentrl.values import chosen

SYSTEM_PROMPT = "Solve the problem; the python tool computes for you. End with the answer as \\boxed{number}."


class PythonEnv(ToolEnv):
    r"""Problems that are solved by writing and running Python, turn by turn.

    After ReTool (Feng et al. 2025, arXiv:2504.11536): reasoning interleaved with code that is run. The model calls
    ``python`` as often as it likes, with variables kept between calls; a turn without a call is the final answer.
    The reward is 1 when its last ``\boxed{}``, or else its last number, has the value of the answer. Only what the
    model wrote is read, so code cannot earn a reward by printing.

    Args:
        difficulty: ``easy``, ``medium`` or ``hard``; several joined by ``+`` take turns.
        topics: of ``number theory``, ``combinatorics``, ``sequences``, ``strings`` and ``simulation``, those joined by
            ``+``; None for all.
        task_seed: another seed, other problems.
        train_data: problems to train on instead, in any form that :func:`agentrl.load_tasks` takes.
        test_data: held-out problems; needed when ``train_data`` is given.
        input_key: column of the problem in these.
        label_key: column of the answer in these.
        failed_code_reward: added for each call whose code raised or passed a limit; usually a little below 0.
        code_timeout: seconds a call may take.
        memory_mb: mebibytes the code may use.
        max_output: characters shown of what a call prints.
        packages: whether code may import the packages installed beside agentrl, such as numpy.
        image: image of the sandbox ``container``.

    How the code is run is the setting ``sandbox``: ``auto`` (bubblewrap, else the container whose ``image`` is given),
    ``bubblewrap``, ``container``, or ``process``, which is no boundary; see docs/safety.md.

    Raises:
        ConfigError: an argument is out of range; on reset, that the sandbox does not work on this machine.
        DataError: a file cannot be used; file and line are named.

    Example:
        >>> env = PythonEnv(sandbox="process")
        >>> env.reset(options={"split": "test", "index": 0})[0]
        'What is the sum of all prime numbers from 163 to 352?'
        >>> code = "sum(n for n in range(163, 353) if all(n % d for d in range(2, n)))"
        >>> env.step('<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>' % code)[0]
        '8303'
        >>> env.step(r"The sum is \boxed{8303}.")[1:3]
        (1.0, True)
        >>> env.close()
    """

    max_turns = 8
    system_prompt = SYSTEM_PROMPT

    def __init__(
        self,
        *,
        difficulty: str = "easy+medium+hard",
        topics: str | None = None,
        task_seed: int = 0,
        train_data: str | Path | None = None,
        test_data: str | Path | None = None,
        input_key: str = "prompt",
        label_key: str = "label",
        failed_code_reward: float = 0.0,
        code_timeout: float = 10.0,
        memory_mb: int = 512,
        max_output: int = 2000,
        packages: bool = False,
        image: str | None = None,
    ) -> None:
        self.failed_code_reward = failed_code_reward
        if train_data or test_data:
            self.tasks = own_tasks(train_data, test_data, input_key, label_key)
        else:
            known = sorted({kind["topic"] for kind in KINDS.values()})
            made = makers(chosen("difficulty", difficulty, LEVELS), chosen("topics", topics or "+".join(known), known))
            self.tasks = {split: GeneratedTasks("python", made, split, task_seed) for split in self.splits}
        limits: dict[str, Any] = {"timeout": code_timeout, "memory_mb": memory_mb, "max_output": max_output}
        self.tools = [PythonTool(packages=packages, image=image, **limits)]

    def check_settings(self) -> None:
        super().check_settings()
        require_number(self, "failed_code_reward", at_least=-1e9)

    async def turn_reward(self, text: str, calls: list[dict]) -> dict[str, float]:
        """``failed_code_reward`` for each of the turn's calls that failed."""
        failed = sum("error" in call for call in calls)
        return {"failed_code": failed * self.failed_code_reward} if failed and self.failed_code_reward else {}

    def reward(self, text: str, answer: str) -> dict[str, float]:
        """1.0 for the right number, else 0.0."""
        return {"correct": math_answer(text, answer)}
