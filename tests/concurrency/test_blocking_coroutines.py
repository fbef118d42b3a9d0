"""A coroutine that blocks is named, and moved to where it holds up nobody; one that does not stays on its loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

import agentrl
from agentrl.concurrency import event_loop
from agentrl.demo import MODEL_DIR
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.rollout.worker import EpisodeRunner
from agentrl.tools import Tool, ToolErrorType, run_calls, tool
from agentrl.types import SamplingParams, Task, ToolCall

LONG = 0.03


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Blocking counts from a fiftieth of a second on, and nothing is known yet."""
    monkeypatch.setattr(event_loop, "HELD_SECONDS", 0.02)
    monkeypatch.setattr(event_loop, "holders", {})


@tool
async def naps() -> str:
    """Blocks."""
    time.sleep(LONG)
    return str(threading.get_ident())


@pytest.fixture
def later(monkeypatch):
    """Blocking counts from a fifth of a second on: no pause of a busy machine is as long."""
    monkeypatch.setattr(event_loop, "HELD_SECONDS", 0.2)


async def called(name: str, made: Any, timeout: float = 5.0) -> Any:
    (result,) = await run_calls([ToolCall(name, {}, "c")], {name: made}, timeout=timeout, max_calls=1)
    return result


def test_one_that_blocks_is_named_once_and_runs_in_a_thread_after_that(caplog):
    async def main() -> list[str]:
        return [(await called("naps", naps)).observation for _ in range(4)]

    here, again, *later = asyncio.run(main())
    assert here == again == str(threading.get_ident()) and here not in later
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "tool 'naps' (test_blocking_coroutines.py:" in record.message and "plain `def`" in record.message


def test_one_that_waits_stays_on_the_loop(caplog, later):
    @tool
    async def waits() -> str:
        """Does not block."""
        await asyncio.sleep(0.3)
        return str(id(asyncio.get_running_loop()))

    async def main() -> None:
        loops = {(await called("waits", waits)).observation for _ in range(3)}
        assert loops == {str(id(asyncio.get_running_loop()))}

    asyncio.run(main())
    assert not caplog.records


def test_a_single_delay_moves_nothing(later):
    delays = iter([0.3, 0, 0])

    @tool
    async def imports() -> str:
        """Slow the first time."""
        time.sleep(next(delays))
        return str(threading.get_ident())

    async def main() -> set[str]:
        return {(await called("imports", imports)).observation for _ in range(3)}

    assert asyncio.run(main()) == {str(threading.get_ident())}


def test_a_timeout_counts_on_the_loop_and_off_it():
    @tool
    async def sleeps() -> str:
        """Blocks for much longer than it may."""
        time.sleep(0.3)
        return ""

    async def main() -> list[Any]:
        return [await called("sleeps", sleeps, timeout=0.01) for _ in range(4)]

    for result in asyncio.run(main()):
        assert result.error is not None and result.error.type is ToolErrorType.TIMEOUT


def test_the_loop_goes_on_while_a_known_blocker_blocks():
    gate = threading.Event()
    gate.set()

    @tool
    async def gated() -> str:
        """Blocks until the loop opens the gate."""
        time.sleep(LONG)
        return str(gate.wait(20))

    async def main() -> None:
        for _ in range(2):
            await called("gated", gated)
        gate.clear()
        others = [asyncio.ensure_future(called("gated", gated, timeout=30)) for _ in range(6)]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(LONG, gate.set)  # on the loop, which must be free for it
        assert [(await other).observation for other in others] == ["True"] * 6

    asyncio.run(main())


def test_a_tool_with_state_keeps_one_thread_and_one_loop_through_an_episode():
    seen: list[tuple[int, Any]] = []

    class Naps(Tool):
        """Blocks."""

        def start(self, env: Any) -> None:
            self.lock: asyncio.Lock | None = None

        async def __call__(self) -> str:
            """Blocks, with a lock that belongs to a loop."""
            time.sleep(LONG)
            self.lock = self.lock or asyncio.Lock()
            async with self.lock:
                seen.append((threading.get_ident(), asyncio.get_running_loop()))
            return ""

    async def main() -> None:
        first, second = Naps().for_episode(None), Naps().for_episode(None)
        for _ in range(2):
            await called("naps", first)
        seen.clear()
        for _ in range(3):
            assert (await called("naps", second)).error is None
        assert len({*seen}) == 1 and seen[0][1] is not asyncio.get_running_loop()

    asyncio.run(main())


class AsyncEnv(agentrl.Env):
    """Blocks in its step; its reset makes what belongs to the loop."""

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.event = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        return "Go.", {}

    async def astep(self, action: str) -> Any:
        time.sleep(LONG)
        asyncio.get_running_loop().call_soon(self.event.set)
        await self.event.wait()
        return str(threading.get_ident()), float(self.loop is asyncio.get_running_loop()), True, False, {}


class AsyncReward(agentrl.ToolEnv):
    tasks = {"train": [("a", "b")], "test": [("c", "d")]}

    async def reward(self, text: str, answer: str) -> float:
        time.sleep(LONG)
        return 1.0


class AsyncTask(AsyncReward):
    tasks = None

    async def task(self, rng: Any, split: str) -> Any:
        time.sleep(LONG)
        return "a", "b"


@pytest.mark.parametrize(
    ("make", "named"),
    [(AsyncEnv, ["AsyncEnv.astep"]), (AsyncReward, ["reward 'reward'"]), (AsyncTask, ["AsyncTask.task", "reward"])],
)
def test_environments_rewards_and_tasks_are_moved_too(make, named):
    chat = ChatTemplate(MODEL_DIR)

    async def main() -> list[Any]:
        client = ScriptedClient(["hello"], chat)
        runner = EpisodeRunner(make, client, chat, SamplingParams(max_new_tokens=16), EpisodeLimits(), 2)
        groups = [await runner.run_group(Task("t", seed=0), 2, f"g{n}") for n in range(4)]
        await runner.close()
        return [t for group in groups for t in group.trajectories]

    played = asyncio.run(main())
    assert [(t.error, t.reward) for t in played] == [(None, 1.0)] * 8
    moved = [holder.what for holder in event_loop.holders.values() if holder.in_thread]
    assert all(any(name in what for what in moved) for name in named), moved


def test_what_waits_for_another_is_not_blamed_for_it(later):
    @tool
    async def naps() -> str:
        """Blocks."""
        time.sleep(0.3)
        return ""

    class Outer(agentrl.ToolEnv):
        tools = [naps]
        tasks = {"train": [("a", "b")], "test": [("c", "d")]}
        reward = "exact_match"

        async def astep(self, action: str) -> Any:
            return await super().astep(action)

    env = Outer()
    for _ in range(3):
        env.reset(seed=0)
        env.step(f"<tool_call>{json.dumps({'name': 'naps', 'arguments': {}})}</tool_call>")
    assert [(holder.what, holder.held) for holder in event_loop.holders.values() if holder.held] == [("tool 'naps'", 2)]


def test_a_coroutine_in_a_thread_is_cancelled_with_its_call():
    cancelled = threading.Event()

    @tool
    async def hangs() -> str:
        """Blocks, then hangs."""
        time.sleep(LONG)
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return ""

    async def main() -> None:
        for _ in range(3):
            cancelled.clear()
            result = await called("hangs", hangs, timeout=0.2)
            assert result.error.type is ToolErrorType.TIMEOUT
            assert await asyncio.to_thread(cancelled.wait, 20)

    asyncio.run(main())
