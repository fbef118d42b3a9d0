"""Partial rollouts: one ends when enough groups have finished, the others go on and are taken by a later one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.data.account import TaskAccount
from agentrl.errors import ConfigError
from agentrl.orchestrator.manager import RolloutManager
from agentrl.types import Group, Task
from tests.orchestrator.test_manager import Finite, episode, made, mark_trained, put_together

FLAGS = ("--partial-rollout", "--over-sampling-batch-size", "5")


class Runner:
    """Groups end when they are told to, by number; their tokens are of the weights that were there then."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.cancelled: list[int] = []
        self.over: dict[int, asyncio.Event] = {}
        self.version = 0
        self.rewards = 0.0, 1.0

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.over.setdefault(number, asyncio.Event()).set()

    async def run_group(self, task: Task, n: int, group_id: str, *, on_trajectory: Any = None) -> Group:
        number = int(group_id[1:])
        self.started.append(number)
        try:
            await self.over.setdefault(number, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        parts = [episode(group_id, i, task) for i in range(n)]
        for part, reward in zip(parts, self.rewards, strict=True):
            part.segments[0].versions[1], part.reward = self.version, reward
        return Group(group_id, task, parts)


def playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, tasks: int = 30) -> Any:
    manager, runner = made(tmp_path, monkeypatch, *FLAGS, *flags, tasks=tasks), Runner()
    manager.runner = runner
    return manager, runner


async def generate(manager: RolloutManager, step: int) -> tuple[list[int], dict[str, float]]:
    """Numbers of the groups in the batch of a rollout, which is trained on, and its metrics."""
    async with asyncio.timeout(20):
        metrics, (batch,), *_ = await manager.generate(step)
    await mark_trained(manager)
    return sorted({int(name[1:]) for name in batch.group_ids}), metrics


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_first_to_finish_are_trained_on_and_the_others_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    manager, runner = playing(tmp_path, monkeypatch)
    runner.end(1, 2, 4)
    groups, metrics = await generate(manager, 0)
    assert groups == [1, 2, 4] and runner.started == [0, 1, 2, 3, 4] and runner.cancelled == []
    assert "rollout/carried" not in metrics and metrics["data/in_flight"] == 2

    runner.end(0, 5, 6, 7)  # the first while the trainer trains
    runner.version = 1
    groups, metrics = await generate(manager, 1)
    assert groups == [0, 5, 6] and runner.started == [*range(8)], "those that were begun before come first"
    assert (metrics["rollout/carried"], metrics["rollout/carried_tokens"]) == (2, 2)
    assert (await manager.peek("rollout 1"))[0] == {"done": 6, "total": 6}

    runner.end(3, 8, 9)
    assert (await generate(manager, 2))[0] == [3, 7, 8]
    counts = manager.account.counts
    assert (counts["trained"], counts["issued"], counts["dropped"], counts["given_back"]) == (9, 11, 0, 0)
    await manager.carried.close(20.0)
    assert runner.cancelled == [10]


async def test_a_rollout_waits_for_groups_that_would_become_too_old(tmp_path: Path, monkeypatch: Any) -> None:
    manager, runner = playing(tmp_path, monkeypatch, "--max-staleness", "1")
    runner.end(2, 3, 4)
    assert (await generate(manager, 0))[0] == [2, 3, 4]
    runner.end(0)
    await settle()
    runner.version = 1
    runner.end(5, 6, 7)
    generating = asyncio.ensure_future(generate(manager, 1))
    await settle()
    assert not generating.done(), "group 1 would be two versions old in the next rollout"
    runner.end(1)
    groups, metrics = await generating
    assert groups == [0, 1, 5] and "rollout/stale" not in metrics
    runner.end(8)
    assert (await generate(manager, 2))[0] == [6, 7, 8]
    await manager.carried.close(20.0)


async def test_rollouts_ahead_take_what_finishes_one_after_the_other(tmp_path: Path, monkeypatch: Any) -> None:
    manager, runner = playing(tmp_path, monkeypatch, "--async-buffer-size", "2")
    runner.end(0, *range(3, 14))
    assert (await generate(manager, 0))[0] == [0, 3, 4]
    await settle()
    assert runner.started == [*range(11)] and manager.rollouts.ready == 2
    assert (await generate(manager, 1))[0] == [5, 6, 7]
    await manager.rollouts.close(20.0)
    await manager.carried.close(20.0)
    assert runner.cancelled == [1, 2]


async def test_after_a_checkpoint_what_was_in_play_is_handed_out_again_and_what_had_finished_is_not_played_again(
    tmp_path: Path, monkeypatch: Any
) -> None:
    manager, runner = playing(tmp_path / "a", monkeypatch)
    runner.end(0, 3, 4)
    await generate(manager, 0)
    runner.end(2)
    await settle()
    state = await manager.state(str(tmp_path / "checkpoint"))
    await manager.carried.close(20.0)
    assert [group["group_id"] for group in state["buffer"]["open"]] == ["g00000001", "g00000002"]
    again, runner = playing(tmp_path / "b", monkeypatch)
    await again.load_state(state, str(tmp_path / "checkpoint"))
    runner.end(1, 5, 6, 7)
    assert (await generate(again, 1))[0] == [1, 2, 5]
    assert runner.started == [1, 5, 6, 7]


async def test_others_are_played_for_groups_that_the_filter_leaves_out(tmp_path: Path, monkeypatch: Any) -> None:
    manager, runner = playing(tmp_path, monkeypatch, "--dynamic-sampling-filter-path", "reward_variance")
    runner.rewards = 1.0, 1.0
    runner.end(0, 1)
    generating = asyncio.ensure_future(generate(manager, 0))
    await settle()
    runner.rewards = 0.0, 1.0
    runner.end(*range(2, 9))
    groups, metrics = await generating
    assert groups == [2, 3, 4] and metrics["rollout/filtered"] == 2
    assert manager.account.counts["dropped"] == 2
    assert runner.started == [0, 1, 2, 3, 4, 5, 6], "as many are in play beyond the rollout as before"
    assert (await generate(manager, 1))[0] == [5, 6, 7]


async def test_the_last_tasks_of_a_source_are_trained_on(tmp_path: Path, monkeypatch: Any) -> None:
    manager, runner = playing(tmp_path, monkeypatch)
    put_together(manager, TaskAccount(Finite(7)), runner)
    runner.end(*range(7))
    assert [(await generate(manager, step))[0] for step in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert await manager.generate(3) is None and manager.account.counts["trained"] == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partial-rollout"], "--partial-rollout needs an --over-sampling-batch-size above --rollout-batch-size 16"),
        ([*FLAGS, "--rollout-batch-size", "2", "--max-staleness", "1"],
         "with --async-buffer-size 0 and --update-weights-interval 1, and --over-sampling-batch-size 5 in rollouts of "
         "2, tokens become 2 versions old"),
        ([*FLAGS, "--rollout-batch-size", "2", "--deterministic"], "--partial-rollout and --deterministic exclude"),
        (["--mask-offpolicy-in-partial-rollout"], "has no effect without --partial-rollout"),
    ],
)  # fmt: skip
def test_what_cannot_be_together_is_refused_with_its_numbers(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["--env", "search", *flags])


def test_masked_tokens_are_in_no_count_of_the_loss_and_join_the_overlong() -> None:
    from agentrl.algorithms import load_algorithm
    from agentrl.config.schema import AlgorithmOptions
    from tests.trainer.samples import random_batch

    batch = random_batch(12)
    young = np.arange(batch.num_tokens) % 2 == 0
    batch = batch.with_columns(in_loss=young.astype(np.uint8), old=batch["rollout"])
    given = load_algorithm(AlgorithmOptions(overlong_handling="mask")).prepare(batch)
    assert (given["in_loss"] == (young & ~batch.truncated[batch.trajectory])).all()
    algorithm = load_algorithm(AlgorithmOptions())
    weights = algorithm.aggregate(batch, range(len(batch)))
    sampled = batch.loss_mask == 1
    assert (weights[sampled & young] > 0).all() and not weights[~young].any() and np.isclose(weights.sum(), 1.0)
    assert "train/overlong_masked" not in algorithm.metrics(batch)


