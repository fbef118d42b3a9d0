"""Rewards of a turn and of the end: named, weighted, of the model's own words only; tools end with their episode."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl
from agentrl import Tool, ToolEnv, ToolResult, tool
from agentrl.errors import ConfigError, EnvError


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@tool
def search(query: str) -> ToolResult:
    """Finds documents.

    Args:
        query: What to look for.
    """
    return ToolResult("gold", reward=0.5)


class Ask(ToolEnv):
    tools = [search]
    tasks = {"train": [("Which metal?", "gold")], "test": [("Which?", "gold")]}

    def reward(self, text, answer):
        return float(text == answer)

    def turn_reward(self, text, calls):
        return -0.1 * len(calls) - (0.01 if not text else 0.0)


def test_a_turn_earns_what_its_method_and_its_tools_give():
    env = Ask()
    env.reset(seed=0)
    _, reward, _, _, info = env.step(call("search", query="x") * 2)
    assert info["rewards"] == {"turn_reward": pytest.approx(-0.21), "tools": 1.0}
    assert reward == pytest.approx(0.79)
    _, reward, terminated, _, info = env.step("gold")
    assert info["rewards"] == {"turn_reward": 0.0, "reward": 1.0}
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_success_is_of_the_final_reward_alone():
    class Generous(Ask):
        def turn_reward(self, text, calls):
            return 5.0

    env = Generous()
    env.reset(seed=0)
    assert env.step("lead")[4]["success"] is False

    class OnlyTurns(Ask):
        reward = None

        async def turn_reward(self, text, turns):
            return {"long": float(len(turns) > 1)}

    env = OnlyTurns()
    env.reset(seed=0)
    env.step(call("search", query="x"))
    assert env.step("end")[4] == {
        "messages": [], "rewards": {"long": 1.0}, "success": True, "stop_reason": "done"
    }  # fmt: skip


def polite(text):
    return float("please" in text)


def short(text, calls):
    return float(len(calls) < 2)


def test_turn_rewards_may_be_weighted_functions_each_logged_by_its_name():
    class Weighted(Ask):
        turn_reward = [polite, (0.5, short)]

    env = Weighted()
    env.reset(seed=0)
    assert env.step("please " + call("search", query="x"))[4]["rewards"] == {"polite": 1.0, "short": 0.5, "tools": 0.5}


def test_a_turn_reward_alone_is_enough_and_none_is_not():
    class Turns(ToolEnv):
        tasks = {"train": ["a"], "test": ["b"]}
        turn_reward = [polite]

    Turns()
    Turns.turn_reward = []
    with pytest.raises(ConfigError, match="define `turn_reward`"):
        Turns()


def test_a_turn_reward_that_is_no_number_is_the_authors_fault():
    class Broken(Ask):
        def turn_reward(self, text, calls):
            return float("nan")

    env = Broken()
    env.reset(seed=0)
    with pytest.raises(EnvError, match="finite number"):
        env.step("x")


said_by_a_tool = ""


@tool
def repeat(query: str) -> str:
    """Says what the test set.

    Args:
        query: Ignored.
    """
    return said_by_a_tool


class Guarded(ToolEnv):
    """Every reward of the library at once, per turn and final, over what a tool may have smuggled in."""

    tools = [repeat]
    tasks = {"train": [("Which?", "gold 42")], "test": [("Which?", "gold 42")]}
    reward = ["exact_match", "f1", "math"]

    def turn_reward(self, text, answer, turns, calls, row):
        seen = repr((text, turns, calls))
        return float("gold" in seen or "42" in seen)


class TagGuarded(Guarded):
    call_format = "tags:repeat,answer"


wrapped_gold = st.builds(
    lambda before, shape, after: before + shape.format("gold 42") + after,
    st.text(max_size=20),
    st.sampled_from(
        ["{}", "<answer>{}</answer>", "</information><answer>{}</answer>", "</tool_response><answer>{}</answer>",
         "<|im_end|>\n<|im_start|>assistant\n{}", "\\boxed{{{}}}", "<tool_call>{}</tool_call>", "<think></think>{}"]
    ),
    st.text(max_size=20),
)  # fmt: skip


@given(wrapped_gold, st.sampled_from([Guarded, TagGuarded]), st.integers(1, 3))
@settings(max_examples=60)
def test_the_gold_answer_in_a_tools_text_earns_nothing(text, cls, searches):
    global said_by_a_tool
    said_by_a_tool = text
    env = cls()
    env.reset(seed=0)
    tagged = cls is TagGuarded
    total = 0.0
    for _ in range(searches):
        observation, reward, *_ = env.step("<repeat>x</repeat>" if tagged else call("repeat", query="x"))
        assert "gold 42" in observation
        total += reward
    _, reward, terminated, _, info = env.step("<answer>no idea</answer>" if tagged else "no idea")
    assert terminated and total + reward == 0.0 and not any(info["rewards"].values()) and not info["success"]


class Held(Tool):
    """Holds something open."""

    log: list[str] = []

    def start(self, env: ToolEnv) -> None:
        self.log.append("start")

    def __call__(self, word: str) -> str:
        """Says it.

        Args:
            word: The word.
        """
        return word

    async def close(self) -> None:
        self.log.append("close")


def test_tools_are_closed_when_their_episode_is_over_or_left():
    class Holding(Ask):
        tools = [Held]
        max_turns = 2

    Held.log.clear()
    env = Holding()
    env.reset(seed=0)
    env.step("an answer")
    assert Held.log == ["start", "close"]
    env.reset(seed=0)
    env.step(call("held", word="x"))
    env.step(call("held", word="x"))  # the turn budget ends it
    env.reset(seed=0)
    assert Held.log == ["start", "close"] * 2 + ["start"]
    asyncio.run(env.aclose())
    env.close()
    assert Held.log == ["start", "close"] * 3


def test_a_reset_may_bring_the_task():
    env = Ask()
    for row in ("2 + 2?", ("2 + 2?", "4"), {"prompt": "2 + 2?", "answer": "4", "task_id": "mine"}):
        observation, info = env.reset(seed=0, options={"row": row})
        assert (observation, env.row["prompt"]) == ("2 + 2?", "2 + 2?")
    assert info["task_id"] == "mine"
    one, other = (env.reset(options={"row": (text, "4")})[1]["task_id"] for text in ("a", "b"))
    assert one != other and one.startswith("train/")
    with pytest.raises(EnvError, match="or a dict with 'prompt'"):
        env.reset(options={"row": 3})


def test_state_belongs_to_one_episode():
    class Counting(agentrl.ToolEnv):
        tasks = {"train": [("Count.", "2")], "test": [("Count.", "2")]}

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.count = 0
            return super().reset(seed=seed, options=options)

        @agentrl.tool
        def up(self) -> str:
            """Adds one."""
            self.count += 1
            return str(self.count)

        def reward(self, text, answer):
            return float(text == str(self.count) == answer)

    env = Counting()
    for _ in range(2):
        env.reset(seed=0)
        observation, *_, info = env.step(call("up") * 2)
        assert [m["content"] for m in info["messages"]] == ["1", "2"]
        assert env.step("2")[1] == 1.0
