"""Every registered environment: truly Gymnasium, the same whichever way it is called, unbroken by any text."""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import agentrl
from agentrl._gymnasium import BUILT_IN
from agentrl.envs.checks import checker

SETTINGS = {"python": {"sandbox": "process"}}
"""What an environment must be told on a machine that has no sandbox."""
SEARCH_R1 = "agentrl.envs.builtin.search:SearchR1Env"
ACTIONS = ["<tool_call>", "<tool_call>{}</tool_call>", "action: 1", "hello"]


@pytest.fixture(autouse=True)
def no_warning_is_tolerated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(params=[*agentrl.registered(), "example", "Guess", "AsyncGuess", "gym:Taxi-v4", SEARCH_R1])
def spec(request: pytest.FixtureRequest, example_spec: str, guess_file: str) -> str:
    if request.param == "example":
        return example_spec
    return f"{guess_file}:{request.param}" if request.param.endswith("Guess") else request.param


@pytest.fixture
def make(spec: str) -> Callable[..., Any]:
    """Makes the environment through ``gymnasium.make``, with Gymnasium's own wrappers."""
    if spec in agentrl.registered():
        return lambda **kwargs: gymnasium.make(f"agentrl/{spec}-v0", **SETTINGS.get(spec, {}), **kwargs)
    return lambda **kwargs: gymnasium.make(agentrl.make(spec).spec, **kwargs)


def test_gymnasiums_checker_finds_nothing(spec, make):
    check_env(agentrl.make(spec, **SETTINGS.get(spec, {})))
    check_env(make().unwrapped)


def test_our_checker_finds_nothing(spec):
    """Any text, both ways alike, the same seed the same episode, two at once, schemas, disjoint splits."""
    report = checker.check_env(spec, **SETTINGS.get(spec, {}))
    assert report.ok, f"{spec}\n{report}"


@pytest.mark.parametrize("name", BUILT_IN)
def test_train_and_test_share_no_task(name):
    """Nor a row, where first messages do not tell tasks apart."""
    env = agentrl.make(name, **SETTINGS.get(name, {}))
    tasks: dict[str, set[str]] = {}
    for split in ("train", "test"):
        count = env.num_tasks(split)
        found = set()
        for number in range(60):
            index = {} if count is None else {"index": number % count}
            _, info = env.reset(seed=number, options={"split": split, **index})
            row = getattr(env.unwrapped, "row", {})
            found.add(repr((info["messages"], {k: v for k, v in row.items() if k not in ("task_id", "split")})))
        tasks[split] = found
    env.close()
    assert not tasks["train"] & tasks["test"] and len(tasks["test"]) > 10


def test_episodes_through_gymnasium_make(make):
    env = make(render_mode="ansi")
    _, info = env.reset(seed=0)
    for _ in range(500):
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        if terminated or truncated:
            break
    assert (terminated or truncated) and info["stop_reason"]
    assert isinstance(env.render(), str)
    env.close()


def test_gymnasiums_wrappers(make):
    env = RecordEpisodeStatistics(TimeLimit(make(disable_env_checker=True), max_episode_steps=1))
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("<tool_call>not a call</tool_call>")
    assert terminated or truncated
    assert (info["episode"]["l"], info["episode"]["r"]) == (1, pytest.approx(reward))
    env.close()


def test_vector_environments(spec, make):
    """``SyncVectorEnv`` over several episodes, and ``AsyncVectorEnv`` in processes, which gives the same."""
    envs = SyncVectorEnv([make] * 2)
    seen = [envs.reset(seed=0)[0], envs.step(["x", "<tool_call>"])[0]]
    for _ in range(12):  # long enough for an autoreset in most
        observations, rewards, *_ = envs.step(["x", "\ud800"])
        assert len(observations) == 2 and rewards.shape == (2,)
    envs.close()
    envs = AsyncVectorEnv([make] * 2, shared_memory=False)
    try:
        assert seen == [envs.reset(seed=0)[0], envs.step(["x", "<tool_call>"])[0]]
    finally:
        envs.close()
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([make])
    if spec in agentrl.registered():
        envs = gymnasium.make_vec(f"agentrl/{spec}-v0", num_envs=2, vectorization_mode="sync", **SETTINGS.get(spec, {}))
        assert len(envs.reset(seed=0)[0]) == 2
        envs.close()


def blocking(spec: str, seed: int) -> list[Any]:
    env = agentrl.make(spec, **SETTINGS.get(spec, {}))
    out: list[Any] = [copy.deepcopy(env.reset(seed=seed))]
    for action in [*env.example_actions, *ACTIONS]:
        out.append(copy.deepcopy(env.step(action)))
        if out[-1][2] or out[-1][3]:
            break
    env.close()
    return out


async def asynchronous(spec: str, seed: int) -> list[Any]:
    env = agentrl.make(spec, **SETTINGS.get(spec, {}))
    out: list[Any] = [copy.deepcopy(await env.areset(seed=seed))]
    for action in [*env.example_actions, *ACTIONS]:
        out.append(copy.deepcopy(await env.astep(action)))
        if out[-1][2] or out[-1][3]:
            break
    await env.aclose()
    return out


def test_many_at_once_are_each_as_if_alone(spec):
    async def together() -> list[list[Any]]:
        return await asyncio.gather(*(asynchronous(spec, seed) for seed in range(4)))

    assert asyncio.run(together()) == [blocking(spec, seed) for seed in range(4)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_first_prompt_fits_the_demo_model_and_names_a_category(name):
    warnings.simplefilter("default")  # transformers has its own
    from agentrl.demo import MODEL_DIR
    from agentrl.rollout.template.chat import ChatTemplate

    chat = ChatTemplate(MODEL_DIR)
    env = agentrl.make(name, **SETTINGS.get(name, {}))
    for split in env.splits:
        for seed in range(3):
            _, info = env.reset(seed=seed, options={"split": split})
            prompts = info.get("prompts") or {"agent": {"messages": info["messages"], "tools": info.get("tools")}}
            for prompt in prompts.values():
                prompt = {"messages": [{"role": "system", "content": prompt}]} if isinstance(prompt, str) else prompt
                assert len(chat.prompt(prompt["messages"], prompt.get("tools"))) < 900
            assert isinstance(info.get("category"), str) and 0 < len(info["category"]) <= 32
    env.close()
