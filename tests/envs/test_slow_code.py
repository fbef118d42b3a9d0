"""Blocking code of one episode never holds up the others: sixteen waits of half a second are not eight seconds."""

from __future__ import annotations

import asyncio
import json
import time
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

WAIT = 0.5
AT_ONCE = 16


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@agentrl.tool
def slow(number: int) -> str:
    """Takes its time.

    Args:
        number: Said again.
    """
    time.sleep(WAIT)
    return str(number)


class SlowTool(agentrl.ToolEnv):
    tools = [slow]
    tasks = {"train": [("Wait.", "done")], "test": [("Wait.", "done")]}
    reward = "exact_match"
    max_calls = AT_ONCE


class SlowReward(SlowTool):
    def reward(self, text: str, answer: str) -> float:
        time.sleep(WAIT)
        return 1.0


class SlowEnv(agentrl.Env):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        time.sleep(WAIT)
        return "Wait.", {}

    def step(self, action: str) -> Any:
        time.sleep(WAIT)
        return "", 1.0, True, False, {"success": True}


class SlowWrapper(wrappers.Wrapper):
    def step(self, action: str) -> Any:
        time.sleep(WAIT)
        return super().step(action)


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(MODEL_DIR)


def test_calls_of_one_turn_run_side_by_side_and_answer_in_order():
    env = SlowTool()
    env.reset(seed=0)
    started = time.monotonic()
    *_, info = env.step("".join(call("slow", number=n) for n in range(AT_ONCE)))
    assert time.monotonic() - started < AT_ONCE * WAIT / 2
    assert [message["content"] for message in info["messages"]] == [str(n) for n in range(AT_ONCE)]


@pytest.mark.parametrize(
    ("make", "waits"),
    [
        (SlowEnv, 2),
        (SlowTool, 1),
        (SlowReward, 2),
        (lambda: wrappers.TimeLimit(SlowEnv(), 3), 2),
        (lambda: SlowWrapper(SlowReward()), 4),
    ],
    ids=["env", "tool", "reward", "wrapped env", "wrapper"],
)
def test_episodes_of_one_runner(make, waits, chat):
    async def main() -> tuple[float, Any, float]:
        policy = ScriptedClient([call("slow", number=1), "done"], chat)
        runner = EpisodeRunner(make, policy, chat, SamplingParams(max_new_tokens=64), EpisodeLimits(), AT_ONCE)
        started = time.monotonic()
        group = await runner.run_group(Task("t", seed=0), AT_ONCE, "g")
        seconds = time.monotonic() - started
        lag = runner.metrics()["event_loop_lag_max"]
        await runner.close()
        return seconds, group, lag

    seconds, group, lag = asyncio.run(main())
    assert [t.error for t in group.trajectories] == [None] * AT_ONCE
    assert all(t.success for t in group.trajectories)
    assert seconds < AT_ONCE * waits * WAIT / 2  # half of what they would take one after another
    assert lag < 2.0  # the loop itself was never held for long
