"""Wrappers and Gymnasium environments in the episode loop: what the model reads, and how episodes end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

import agentrl
from agentrl import wrappers
from agentrl.demo import MODEL_DIR
from agentrl.errors import InfraError
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import Group, SamplingParams, StopReason, Task


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


failures = 0


@agentrl.tool
def echo(text: str) -> str:
    """Says it again.

    Args:
        text: What to say.
    """
    global failures
    if failures:
        failures -= 1
        raise InfraError("the echo service is down")
    return text


class Ask(agentrl.ToolEnv):
    tools = [echo]
    reward = "exact_match"

    def task(self, rng, split):
        return f"{split} {rng.integers(1000)}", "gold"


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(MODEL_DIR)


@pytest.fixture
def play(chat) -> Callable[..., tuple[Group, dict[str, float]]]:
    def played(make: Callable[[], Any], script: Any, n: int = 1, **options: Any) -> tuple[Group, dict[str, float]]:
        async def main() -> tuple[Group, dict[str, float]]:
            runner = EpisodeRunner(
                make, ScriptedClient(script, chat), chat, SamplingParams(max_new_tokens=128), EpisodeLimits(), 4
            )
            group = await runner.run_group(Task("t", seed=0, split="test", options=options), n, "g")
            metrics = runner.metrics()
            await runner.close()
            return group, metrics

        return asyncio.run(asyncio.wait_for(main(), 60))

    return played


def test_the_model_reads_what_the_wrappers_left(play, chat, tmp_path):
    def make() -> Any:
        tasks = [{"prompt": "Say it.", "answer": "gold"}]
        return wrappers.RecordEpisodes(
            wrappers.TruncateToolOutput(wrappers.FixedTasks(Ask(), {"test": tasks}), 5), tmp_path
        )

    group, _ = play(make, [call("echo", text="abcdefgh"), "gold"], n=2, index=0)
    for trajectory in group.trajectories:
        assert (trajectory.error, trajectory.reward, trajectory.success) == (None, 1.0, True)
        assert [m["content"] for m in trajectory.messages if m["role"] in ("user", "tool")] == [
            "Say it.", "abcde\n[3 more characters cut]"
        ]  # fmt: skip
        read = chat.decode(trajectory.segments[0].tokens)
        assert "abcde\n[3 more characters cut]" in read and read.count("abcdefgh") == 1  # the model's own call
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert [line["finished"] for line in lines] == [True, True]


@pytest.mark.parametrize("limit", [wrappers.TimeLimit, gymnasium.wrappers.TimeLimit])
def test_a_limit_truncates_with_its_reason(play, limit):
    group, _ = play(lambda: wrappers.Wrapper(limit(Ask(), 2)), [call("echo", text="x")])
    (trajectory,) = group.trajectories
    ours = limit is wrappers.TimeLimit
    assert trajectory.stop_reason is (StopReason.MAX_TURNS if ours else StopReason.ENV_TRUNCATED)
    assert (trajectory.num_turns, trajectory.success) == (2, False)


def test_retries_stay_within_the_episode(play):
    global failures
    failures = 2
    script = [call("echo", text="a"), call("echo", text="b"), "gold"]
    group, metrics = play(lambda: wrappers.RetryOnInfraError(Ask(), attempts=3, backoff=0.0), script)
    assert failures == 0 and metrics["retries"] == 0
    (trajectory,) = group.trajectories
    assert (trajectory.error, trajectory.success, trajectory.num_turns) == (None, True, 3)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["a", "b"]


def test_shaped_rewards_are_in_the_record(play):
    def make() -> Any:
        return wrappers.ShapeReward(Ask(), lambda action, observation: {"length": -0.125 * len(action.split())})

    (trajectory,) = play(make, ["gold"])[0].trajectories
    assert trajectory.rewards == {"exact_match": 1.0, "length": -0.125} and trajectory.reward == 0.875
    assert trajectory.success is True


def test_agents_under_a_wrapper_still_take_turns(play):
    def policy(prompt: str, turn: int) -> str:
        return prompt.rpartition("Meant: ")[2].split()[0] if "Meant: " in prompt else "1"

    bare = play(lambda: agentrl.make("multi_agent"), policy)[0]
    wrapped = play(lambda: wrappers.TimeLimit(agentrl.make("multi_agent"), 50), policy)[0]
    assert len(wrapped.trajectories) == len(bare.trajectories) > 1
    assert [t.messages for t in wrapped.trajectories] == [t.messages for t in bare.trajectories]


def test_a_gymnasium_environment_is_won_and_lost(play):
    def make() -> Any:
        return agentrl.make("gym:FrozenLake-v1", is_slippery=False)

    moves = [f"action: {word}" for word in ("down", "down", "right", "right", "down", "right")]
    (won,) = play(make, ["I do not know.", *moves])[0].trajectories
    assert (won.error, won.reward, won.success, won.num_turns) == (None, 1.0, True, 7)
    assert won.stop_reason is StopReason.DONE and won.rewards == {"game": 1.0}
    assert "Nothing was done" in won.messages[3]["content"]
    (lost,) = play(make, ["right", "down"])[0].trajectories
    assert (lost.reward, lost.success) == (0.0, False)


def test_a_run_finds_the_tasks_of_a_wrapper(tmp_path):
    from agentrl.envs.registry import make_env
    from agentrl.tasks.source import TaskSource, held_out_tasks

    (tmp_path / "made.py").write_text(
        "import agentrl\n"
        "class Ask(agentrl.ToolEnv):\n"
        "    reward = 'exact_match'\n"
        "    def task(self, rng, split):\n        return 'endless', 'x'\n"
        "def make_env():\n"
        "    rows = [{'prompt': f'{n}?', 'answer': str(n), 'split': 'train' if n < 3 else 'dev'} for n in range(5)]\n"
        "    return agentrl.wrappers.FixedTasks(Ask(), rows)\n"
    )
    spec = f"{tmp_path}/made.py:make_env"
    env = make_env(spec, {}, tool_timeout=3.0)
    assert env.tool_timeout == 3.0
    assert TaskSource.of_env(spec, env).num_tasks == 3
    assert [task.options["index"] for task in held_out_tasks(spec, env, split="dev")] == [0, 1]
