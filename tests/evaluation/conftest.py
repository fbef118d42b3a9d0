"""A small environment, and servers that answer it: evaluations without engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeOpenAI, completion

from agentrl.config import load_eval_config
from agentrl.evaluation.run import evaluate

SUMS = '''
import os
import agentrl
from agentrl.errors import InfraError


@agentrl.tool
def note(text: str) -> str:
    """Writes something down.

    Args:
        text: What.
    """
    return "noted"


def short(text, answer):
    return 0.25 if len(text) < 3 else 0.0


class Sums(agentrl.ToolEnv):
    """n + n, in two categories; a task named in BROKEN fails for reasons of infrastructure."""

    tools = [note]
    reward = ["exact_match", short]

    def num_tasks(self, split):
        return 12

    def task(self, rng, split):
        number = int(self._options["index"])
        if str(number) in os.environ.get("BROKEN", "").split(","):
            raise InfraError("the database is down")
        return {"prompt": f"{number} + {number} = ?", "answer": str(2 * number)}

    def _after_reset(self, result):
        observation, info = super()._after_reset(result)
        info["category"] = "odd" if int(self._options["index"]) % 2 else "even"
        return observation, info
'''


def adds(wrong_from: int = 10**6) -> Callable[[dict[str, Any]], Any]:
    """A model that adds, and from the task ``wrong_from`` on is wrong; it takes a note first."""

    def answer(body: dict[str, Any]) -> Any:
        (number,) = re.findall(r"(\d+) \+ \d+", body["messages"][0]["content"])
        if body["messages"][-1]["role"] == "user":
            return completion('<tool_call>\n{"name": "note", "arguments": {"text": "go"}}\n</tool_call>', usage=(20, 5))
        right = 2 * int(number)
        return completion(str(right if int(number) < wrong_from else right + 1), usage=(30, 2))

    return answer


@pytest.fixture
def sums(tmp_path: Path) -> str:
    """Spec of the environment, in a file of its own."""
    file = tmp_path / "sums.py"
    file.write_text(SUMS, encoding="utf-8")
    return f"{file}:Sums"


@pytest.fixture
def run_eval(sums: str, tmp_path: Path) -> Callable[..., int]:
    """``run_eval(server, *flags)``: the exit code of an evaluation into ``tmp_path / "out"``."""

    def run(server: FakeOpenAI, *flags: str) -> int:
        argv = ["--env", sums, "--base-url", server.url, "--model", "m", "--output-dir", str(tmp_path / "out")]
        return evaluate(load_eval_config([*argv, *flags]))

    return run
