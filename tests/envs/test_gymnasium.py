"""Truly Gymnasium: the checker without a warning, wrappers and vector environments, for every environment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import agentrl


@pytest.fixture(autouse=True)
def no_warning_is_tolerated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(params=[*agentrl.registered(), "example", "Guess", "AsyncGuess"])
def spec(request: pytest.FixtureRequest, example_spec: str, guess_file: str) -> str:
    if request.param == "example":
        return example_spec
    return f"{guess_file}:{request.param}" if request.param.endswith("Guess") else request.param


@pytest.fixture
def make(spec: str) -> Callable[..., Any]:
    """Makes the environment through ``gymnasium.make``, with Gymnasium's own wrappers."""
    if spec in agentrl.registered():
        return lambda **kwargs: gymnasium.make(f"agentrl/{spec}-v0", **kwargs)
    return lambda **kwargs: gymnasium.make(agentrl.make(spec).spec, **kwargs)


def test_the_checker_finds_nothing(spec, make):
    check_env(agentrl.make(spec))
    check_env(make().unwrapped)


def test_episodes_through_gymnasium_make(make):
    env = make(render_mode="ansi")
    env.reset(seed=0)
    for _ in range(20):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            break
    assert terminated or truncated
    assert isinstance(env.render(), str)
    env.close()


def test_wrappers(make):
    env = RecordEpisodeStatistics(TimeLimit(make(disable_env_checker=True), max_episode_steps=1))
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("<tool_call>not a call</tool_call>")
    assert terminated or truncated
    assert (info["episode"]["l"], info["episode"]["r"]) == (1, reward)


def test_sync_vector(make):
    envs = SyncVectorEnv([make] * 3)
    observations, info = envs.reset(seed=0)
    assert len(observations) == len(info["task_id"]) == 3
    for _ in range(12):  # long enough for an autoreset
        observations, rewards, *_ = envs.step(["x", "<tool_call>", "\ud800"])
        assert rewards.shape == (3,)
    envs.close()


def test_async_vector(make):
    envs = AsyncVectorEnv([make] * 2, shared_memory=False)
    try:
        asynchronous = [envs.reset(seed=0)[0], envs.step(["x", "<tool_call>"])[0]]
    finally:
        envs.close()
    envs = SyncVectorEnv([make] * 2)
    assert asynchronous == [envs.reset(seed=0)[0], envs.step(["x", "<tool_call>"])[0]]


def test_async_vector_with_shared_memory_says_what_to_pass(make):
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([make])


def test_make_vec(spec):
    if spec in agentrl.registered():
        envs = gymnasium.make_vec(f"agentrl/{spec}-v0", num_envs=2, vectorization_mode="sync")
        assert len(envs.reset(seed=0)[0]) == 2


def test_two_seeded_episodes_are_equal_and_both_ways_of_calling_agree(spec):
    actions = ["<tool_call>", "hello", "<tool_call>{}</tool_call>"]

    def blocking() -> list[Any]:
        env = agentrl.make(spec)
        out: list[Any] = [env.reset(seed=11)]
        for action in actions:
            out.append(env.step(action))
            if out[-1][2] or out[-1][3]:
                break
        return out

    async def asynchronous() -> list[Any]:
        env = agentrl.make(spec)
        out: list[Any] = [await env.areset(seed=11)]
        for action in actions:
            out.append(await env.astep(action))
            if out[-1][2] or out[-1][3]:
                break
        return out

    assert blocking() == blocking() == asyncio.run(asynchronous())


@pytest.mark.parametrize(
    "order",
    [
        "import agentrl, gymnasium",
        "import gymnasium, agentrl",
        "import agentrl, importlib.util; importlib.util.find_spec('gymnasium'); import gymnasium",
        "import agentrl.envs, gymnasium",
    ],
)
def test_ids_are_known_in_whatever_order_the_two_are_imported(order):
    program = f"{order}; print(gymnasium.spec('agentrl/search-v0').entry_point)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "agentrl.envs.search:SearchEnv", done.stderr


def test_importing_agentrl_loads_nothing_heavy():
    program = (
        "import sys, agentrl\n"
        "heavy = ('numpy', 'gymnasium', 'torch', 'ray', 'sglang', 'transformers')\n"
        "assert not [name for name in heavy if name in sys.modules], sys.modules.keys()\n"
        "agentrl.ToolEnv, agentrl.tool, agentrl.make, agentrl.PromptEnv, agentrl.spaces, agentrl.rewards\n"
        "assert not [name for name in heavy[2:] if name in sys.modules]\n"
        "assert set(agentrl.__all__) <= set(dir(agentrl))\n"
        "[getattr(agentrl, name) for name in agentrl.__all__]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
