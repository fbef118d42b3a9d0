"""Groups come from the dispatcher as they finish, and their order decides nothing in the sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.algorithms.grpo import GRPO
from agentrl.config.schema import AlgorithmOptions
from agentrl.data.account import PendingGroup, TaskAccount
from agentrl.data.deaths import FailedTasks
from agentrl.data.store import TrajectoryStore
from agentrl.orchestrator.dispatcher import Dispatcher
from agentrl.orchestrator.sink import Sink
from agentrl.tasks.source import TaskSource
from agentrl.types import Group, Segment, StopReason, Trajectory


class Player:
    """Groups end when they are told to, by the number of their task."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def __call__(self, pending: PendingGroup) -> Group:
        self.started.append(pending.group_id)
        self.ends[pending.group_id] = asyncio.Event()
        try:
            await self.ends[pending.group_id].wait()
        finally:
            self.ended.append(pending.group_id)
        return Group(pending.group_id, pending.task, [])

    async def until_started(self, number: int) -> None:
        async with asyncio.timeout(20):
            while len(self.started) < number:
                await asyncio.sleep(0)


@pytest.fixture
def parts(tmp_path: Path) -> Callable[..., tuple[TaskAccount, Player, Dispatcher]]:
    def make(capacity: int) -> tuple[TaskAccount, Player, Dispatcher]:
        account, player = TaskAccount(TaskSource("search", None)), Player()
        failed = FailedTasks(tmp_path / "failed_tasks.json")
        return account, player, Dispatcher(account, player, failed=failed, capacity=capacity)

    return make


async def test_a_group_is_emitted_as_soon_as_it_has_finished(parts: Any) -> None:
    _, player, dispatcher = parts(capacity=3)
    drawn = dispatcher.draw(3)
    async with aclosing(dispatcher.play(drawn)) as finished:
        for number in (2, 0, 1):
            taking = asyncio.ensure_future(anext(finished))
            await player.until_started(3)
            player.ends[drawn[number].group_id].set()
            assert (await asyncio.wait_for(taking, 20)).group_id == drawn[number].group_id
        with pytest.raises(StopAsyncIteration):
            await anext(finished)


async def test_no_more_groups_are_under_way_than_there_is_room_for(parts: Any) -> None:
    """Also of tasks without end: who takes no groups has no more made."""
    account, player, dispatcher = parts(capacity=4)
    endless = (pending for _ in count() for pending in dispatcher.draw(1))
    async with aclosing(dispatcher.play(endless)) as finished:
        taking = asyncio.ensure_future(anext(finished))
        await player.until_started(4)
        for event in player.ends.values():
            event.set()
        await asyncio.wait_for(taking, 20)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(player.started) == 4 == account.counts["in_flight"]


async def test_an_iterator_that_is_closed_leaves_nothing_in_play_and_loses_no_task(parts: Any) -> None:
    account, player, dispatcher = parts(capacity=8)
    finished = dispatcher.play(dispatcher.draw(5))
    taking = asyncio.ensure_future(anext(finished))
    await player.until_started(5)
    player.ends["g00000003"].set()
    await asyncio.wait_for(taking, 20)
    await asyncio.wait_for(finished.aclose(), 20)
    assert sorted(player.ended) == [f"g{n:08d}" for n in range(5)]
    assert account.counts["in_flight"] == 5


async def test_an_error_of_a_group_is_raised_at_once_and_ends_the_others(parts: Any) -> None:
    _, player, dispatcher = parts(capacity=3)

    async def play(pending: PendingGroup) -> Group:
        if pending.group_id == "g00000002":
            raise ValueError("a defect")
        return await player(pending)

    dispatcher._play = play
    with pytest.raises(ValueError, match="a defect"):
        await asyncio.wait_for(anext(dispatcher.play(dispatcher.draw(3))), 20)
    assert sorted(player.ended) == ["g00000000", "g00000001"]


def group_of(pending: PendingGroup, reason: StopReason) -> Group:
    mask = np.array([0, 1], np.uint8)
    segment = Segment(mask.astype(np.int32), mask, -mask.astype(np.float32), mask.astype(np.int32), 1)
    parts = [
        Trajectory(f"{pending.group_id}-{i}", pending.group_id, pending.task, [segment], [], reward=float(i),
                   stop_reason=reason, info={"retryable": True})  # fmt: skip
        for i in range(2)
    ]
    return Group(pending.group_id, pending.task, parts)


@pytest.mark.parametrize("finishing", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
async def test_the_batch_does_not_depend_on_the_order_in_which_groups_finish(tmp_path: Path, finishing: Any) -> None:
    learned: list[str] = []
    source = SimpleNamespace(
        get_samples=TaskSource("search", None).get_samples,
        add_samples=lambda groups: learned.extend(g.group_id for g in groups),
    )
    account = TaskAccount(source)
    sink = Sink(
        account, GRPO(AlgorithmOptions()), failed=FailedTasks(tmp_path / "f.json"),
        store=TrajectoryStore(tmp_path / "trajectories"), size=4,
    )  # fmt: skip
    drawn = account.get_samples(4)
    rollout = sink.begin(0)
    rollout.expect(drawn)
    for number in finishing:
        rollout.add(group_of(drawn[number], StopReason.ENV_ERROR if number == 1 else StopReason.DONE))
    assert await rollout.wanted() == 0 and await rollout.settle()
    collected = await sink.take(rollout)
    assert [g.group_id for g in collected.groups] == learned == ["g00000000", "g00000002", "g00000003"]
    assert [g.group_id for g in collected.lost] == ["g00000001"]
    assert [t.group_id for t in sink.store.read("train", step=0)][::2] == [f"g{n:08d}" for n in (1, 0, 2, 3)]
    assert (account.counts["ready"], account.counts["given_back"]) == (3, 1)
    await sink.mark_trained({"advantage": np.zeros(collected.batch.num_tokens, np.float32)}, tokens=False)
    assert (account.counts["trained"], account.counts["ready"]) == (3, 0)
