"""The action of a step: text that carries its parse."""

from __future__ import annotations

import copy
import pickle

import gymnasium
import pytest
from rollout_cases import CALL

import agentrl
from agentrl.envs.wrappers.base import Wrapper
from agentrl.rollout.episode import EpisodeLimits, run_episode
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.tools.formats import Action, HermesParser, get_parser
from agentrl.types import SamplingParams, StopReason, Task


@agentrl.tool
def search(query: str) -> str:
    """Finds a page.

    Args:
        query: What to look for.
    """
    return f"a page about {query}"


class Ask(agentrl.ToolEnv):
    tools = [search]

    def task(self, rng, split):
        return "who wrote it?", "Ann."

    def reward(self, text, answer):
        return float(text == answer)


def played(run, env, chat, script=(CALL, "Ann.")):
    return run(
        run_episode(
            env, Task("t", seed=0), client=ScriptedClient(list(script), chat), chat=chat, params=SamplingParams(),
            limits=EpisodeLimits(max_context_len=2000), trajectory_id="t", group_id="g",
        )
    )  # fmt: skip


@pytest.fixture
def parsed(monkeypatch):
    """The texts that were parsed."""
    texts, parse = [], HermesParser.parse
    monkeypatch.setattr(HermesParser, "parse", lambda self, text: texts.append(text) or parse(self, text))
    return texts


def test_a_turn_is_parsed_once(run, chat, parsed):
    trajectory = played(run, Ask(), chat)
    assert trajectory.stop_reason is StopReason.DONE and trajectory.reward == 1.0
    assert [c["name"] for c in trajectory.tool_calls] == ["search"]
    assert parsed == [CALL, "Ann."]


def test_what_a_wrapper_edits_is_parsed_anew(run, chat, parsed):
    class Them(Wrapper):
        async def astep(self, action):
            return await super().astep(action.replace("it", "them"))

    trajectory = played(run, Them(Ask()), chat)
    assert trajectory.tool_calls[0]["arguments"] == {"query": "them"}
    assert parsed == [CALL, CALL.replace("it", "them"), "Ann.", "Ann."]


def test_another_format_and_other_tools_are_parsed_anew():
    text = "<tool_call>search<arg_key>query</arg_key><arg_value>3</arg_value></tool_call>"

    def takes(kind):
        schema = {"type": "object", "properties": {"query": {"type": kind}}}
        function = {"name": "search", "parameters": schema}
        return get_parser("glm").with_tools([{"type": "function", "function": function}])

    action = Action(text, takes("integer"))
    assert action.calls[0].arguments == {"query": 3}
    assert takes("integer").read(action) is action.parsed
    assert takes("string").read(action).tool_calls[0].arguments == {"query": "3"}
    assert get_parser("none").read(action).tool_calls == []


def test_it_is_text_to_everything_else():
    action = Action(CALL, get_parser("hermes"))
    assert action == CALL and hash(action) == hash(CALL) and action in Ask.action_space
    copies = (copy.copy(action), copy.deepcopy(action), pickle.loads(pickle.dumps(action)), str(action))
    assert all(type(text) is str and text == CALL for text in copies)


def test_a_blocking_step_gets_it_too(run, chat):
    seen = []

    class Plain(gymnasium.Env):
        observation_space = action_space = Ask.action_space
        call_format = "hermes"

        def reset(self, *, seed=None, options=None):
            assert "call_format" not in options  # it names its own
            return "go", {}

        def step(self, action):
            seen.append([call.name for call in action.calls])
            return "more", 0.0, len(seen) == 2, False, {}

    assert played(run, Plain(), chat).stop_reason is StopReason.DONE
    assert seen == [["search"], []]
