"""What is bound to a thread, such as a connection of sqlite3, lives from the start of an episode to its end."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import threading
from typing import Any

import pytest

import agentrl
from agentrl import wrappers
from agentrl.concurrency import threads
from agentrl.concurrency.threads import OwnThread, own_thread, run_blocking
from agentrl.demo import MODEL_DIR
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, Task

CALL = f"<tool_call>{json.dumps({'name': 'sql', 'arguments': {'query': 'select value from t'}})}</tool_call>"
closed: list[int] = []


def opened() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    db.execute("create table t (value)")
    db.execute("insert into t values (7)")
    return db


class Sql(agentrl.Tool):
    """A table of one number."""

    name = "sql"

    def start(self, env: Any) -> None:
        self.db = opened()

    def __call__(self, query: str) -> str:
        """Args:
        query: In SQL.
        """
        return str(self.db.execute(query).fetchone()[0])

    def close(self) -> None:
        self.db.close()
        closed.append(threading.get_ident())


class ByTool(agentrl.ToolEnv):
    tools = [Sql]
    tasks = {"train": [("What is in t?", "7")], "test": [("Is it 7?", "7")]}
    reward = "exact_match"


class ByInstance(ByTool):
    tools = [Sql()]


class ByMethod(agentrl.ToolEnv):
    """A connection of the environment: opened by the task, used by a tool and by the reward."""

    def task(self, rng: Any, split: str) -> Any:
        self.db = opened()
        return f"What is in t? ({split} {rng.integers(10**9)})", "7"

    @agentrl.tool
    def sql(self, query: str) -> str:
        """Asks the table.

        Args:
            query: In SQL.
        """
        return str(self.db.execute(query).fetchone()[0])

    def reward(self, text: str, answer: str) -> float:
        return float(text == str(self.db.execute("select value from t").fetchone()[0]))


class Blocking(agentrl.Env):
    """A connection made by the constructor of an environment without coroutines."""

    def __init__(self) -> None:
        self.db = opened()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.turn = 0
        return str(self.db.execute("select count(*) from t").fetchone()[0]), {}

    def step(self, action: str) -> Any:
        self.turn += 1
        found = str(self.db.execute("select value from t").fetchone()[0])
        return found, float(action == found), self.turn == 2, False, {}

    def close(self) -> None:
        self.db.close()
        closed.append(threading.get_ident())


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(MODEL_DIR)


@pytest.mark.parametrize(
    "make",
    [ByTool, ByInstance, ByMethod, Blocking, lambda: wrappers.TimeLimit(ByMethod(), 3)],
    ids=["tool class", "tool instance", "method", "blocking env", "wrapped"],
)
def test_a_connection_of_sqlite_serves_an_episode(make, chat):
    async def main() -> list[Any]:
        policy = ScriptedClient([CALL, "7"], chat)
        runner = EpisodeRunner(make, policy, chat, SamplingParams(max_new_tokens=128), EpisodeLimits(), 8)
        groups = [await runner.run_group(Task(f"t{n}", seed=n), 8, f"g{n}") for n in range(3)]
        await runner.close()
        return [trajectory for group in groups for trajectory in group.trajectories]

    closed.clear()
    played = asyncio.run(main())
    assert [(t.error, t.reward) for t in played] == [(None, 1.0)] * 24
    assert all("7" in message["content"] for t in played for message in t.messages if message["role"] == "tool")
    if make in (ByTool, ByInstance):
        assert len(closed) == 24
    if make is Blocking:
        assert len(closed) == 8


def test_it_does_so_under_plain_gymnasium():
    for env in (ByTool(), ByMethod()):
        env.reset(seed=0)
        assert env.step(CALL)[0] == "7"
        assert env.step("7")[1] == 1.0
        env.close()


def test_a_thread_ends_with_its_owner():
    class Owner:
        pass

    async def name_of(owner: Any) -> threading.Thread:
        return await own_thread(owner).run(threading.current_thread)

    async def main() -> None:
        one, two = Owner(), Owner()
        thread = await name_of(one)
        assert await name_of(one) is thread is not await name_of(two)
        alive = threads._Worker.alive
        del one
        gc.collect()
        await run_blocking(thread.join, 20)
        assert not thread.is_alive()
        assert threads._Worker.alive < alive

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_second_call_at_the_same_time_runs_elsewhere():
    async def main() -> None:
        thread, inside, go_on = OwnThread(), threading.Event(), threading.Event()

        def hang() -> int:
            inside.set()
            go_on.wait(20)
            return threading.get_ident()

        hung = asyncio.ensure_future(thread.run(hang))
        await run_blocking(inside.wait, 20)
        elsewhere = await thread.run(threading.get_ident)
        go_on.set()
        own = await hung
        assert elsewhere != own == await thread.run(threading.get_ident)

    asyncio.run(main())


def test_beyond_the_bound_objects_share_the_pool(monkeypatch):
    monkeypatch.setattr(threads, "MAX_OWN_THREADS", 0)
    assert asyncio.run(OwnThread().run(threading.current_thread)).name == "agentrl-blocking"
