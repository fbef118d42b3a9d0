"""Blocking code of one episode never holds up the others: sixteen waits of half a second are not eight seconds."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

import agentrl
from agentrl import wrappers
from agentrl.demo import MODEL_DIR
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, Task

AT_ONCE = 16
all_of_them = threading.Barrier(AT_ONCE)
"""What is slow waits until it runs as often, side by side."""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@agentrl.tool
def slow(number: int) -> str:
    """Takes its time.

    Args:
        number: Said again.
    """
    all_of_them.wait(60)
    return str(number)


class SlowTool(agentrl.ToolEnv):
    tools = [slow]
    tasks = {"train": [("Wait.", "done")], "test": [("Wait.", "done")]}
    reward = "exact_match"
    max_calls = AT_ONCE
    tool_timeout = 90


class SlowReward(SlowTool):
    def reward(self, text: str, answer: str) -> float:
        all_of_them.wait(60)
        return 1.0


class SlowEnv(agentrl.Env):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        all_of_them.wait(60)
        return "Wait.", {}

    def step(self, action: str) -> Any:
        all_of_them.wait(60)
        return "", 1.0, True, False, {"success": True}


class SlowWrapper(wrappers.Wrapper):
    def step(self, action: str) -> Any:
        all_of_them.wait(60)
        return super().step(action)


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(MODEL_DIR)


def test_calls_of_one_turn_run_side_by_side_and_answer_in_order():
    env = SlowTool()
    env.reset(seed=0)
    *_, info = env.step("".join(call("slow", number=n) for n in range(AT_ONCE)))
    assert [message["content"] for message in info["messages"]] == [str(n) for n in range(AT_ONCE)]


@pytest.mark.parametrize(
    "make",
    [
        SlowEnv,
        SlowTool,
        SlowReward,
        lambda: wrappers.TimeLimit(SlowEnv(), 3),
        lambda: SlowWrapper(SlowReward()),
    ],
    ids=["env", "tool", "reward", "wrapped env", "wrapper"],
)
def test_episodes_of_one_runner(make, chat):
    async def main() -> Any:
        policy = ScriptedClient([call("slow", number=1), "done"], chat)
        runner = EpisodeRunner(make, policy, chat, SamplingParams(max_new_tokens=64), EpisodeLimits(), AT_ONCE)
        group = await runner.run_group(Task("t", seed=0), AT_ONCE, "g")
        await runner.close()
        return group

    group = asyncio.run(main())
    assert [t.error for t in group.trajectories] == [None] * AT_ONCE
    assert all(t.success for t in group.trajectories)
