"""Every built-in environment against a server that is as strict as OpenAI's about histories."""

import asyncio
import random
from itertools import count

import pytest
from fake_openai import FakeOpenAI, call, completion

from agentrl._gymnasium import BUILT_IN
from agentrl.envs.registry import make_env
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.openai import OpenAIClient, ServerChat
from agentrl.rollout.worker import EpisodeRunner
from agentrl.tasks.source import held_out_tasks
from agentrl.types import Outcome, SamplingParams

VALUES = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
WORDS = ["Answer: 3", "go north", "look", "1", "<answer>yes</answer>", "<tool_call>{oops", "", None, "hello there"]


def clumsy(seed):
    """A model that calls tools at random: several at once, with malformed arguments, with and without ids."""
    rng, ids = random.Random(seed), count()

    def reply(body):
        if not body.get("tools") or rng.random() < 0.3:
            return completion(rng.choice(WORDS), **({"reasoning_content": "hm"} if rng.random() < 0.3 else {}))
        calls = []
        for _ in range(rng.choice([1, 1, 3])):
            function = rng.choice(body["tools"])["function"]
            properties = function["parameters"].get("properties", {})
            arguments = {name: VALUES.get(str(p.get("type")), "x") for name, p in properties.items()}
            text = rng.choice([arguments, arguments, {}, "{bad"])
            name = rng.choice([function["name"]] * 9 + ["no_such_tool"])
            calls.append(call(name, text, rng.choice([f"id-{next(ids)}", None])))
        return completion(rng.choice(["", None, "I look."]), tool_calls=calls)

    return reply


@pytest.mark.parametrize("name", [*BUILT_IN, "gym:FrozenLake-v1"])
def test_histories_are_always_well_formed(run, name):
    env = make_env(name, {})
    tasks = held_out_tasks(name, env, split="test", limit=8)
    env.close()

    async def play(url):
        async with OpenAIClient(url, "m") as client:
            limits = EpisodeLimits(max_turns=5, max_context_len=10**6)
            runner = EpisodeRunner(
                lambda: make_env(name, {}), client, ServerChat(), SamplingParams(), limits, 4, max_retries=0
            )
            try:
                groups = await asyncio.gather(*(runner.run_group(t, 1, f"g{i}") for i, t in enumerate(tasks)))
            finally:
                await runner.close()
            return [t for group in groups for t in group.trajectories]

    with FakeOpenAI(clumsy(7)) as server:
        trajectories = run(play(server.url), 60)
        assert len(server.bodies) > len(tasks)
    errors = [t.error for t in trajectories if t.outcome is Outcome.INFRA_ERROR]
    assert len(trajectories) >= len(tasks) and not errors
