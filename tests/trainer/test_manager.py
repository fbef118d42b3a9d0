"""The rollout manager without engines: which tasks count as trained, and what ends a rollout at once."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.data.buffer import DataBuffer
from agentrl.data.tasks import TaskSource
from agentrl.errors import DataError, EngineError
from agentrl.trainer import manager as module
from agentrl.trainer.manager import RolloutManager
from agentrl.types import Group, Segment, StopReason, Task, Trajectory


def episode(group_id: str, index: int, task: Task, reason: StopReason = StopReason.DONE) -> Trajectory:
    mask = np.array([0, 1], np.uint8)
    tokens = np.array([1, 2], np.int32)
    segment = Segment(tokens, mask, -mask.astype(np.float32), np.where(mask, 0, -1).astype(np.int32), 1)
    failed = reason is not StopReason.DONE
    return Trajectory(
        f"{group_id}-{index}", group_id, task, [] if failed else [segment], [], reward=float(index), stop_reason=reason
    )


class Pool:
    broken: str | None = None
    stopped = False

    async def hold(self) -> None: ...

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def manager(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> RolloutManager:
    (tmp_path / "logs").mkdir()
    cfg = load_config(["--env", "search", "--rollout-batch-size", "3", "--n-samples-per-prompt", "2"])
    made = RolloutManager(cfg, str(tmp_path), "model", [{}])
    made.pool, made.buffer = Pool(), DataBuffer(TaskSource("search", 10))
    counters = dict.fromkeys(("retries", "continuations", "failures", "prompt_tokens", "cached_tokens"), 0.0)
    made.client = SimpleNamespace(metrics=lambda: counters)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=lambda batch: batch))
    return made


async def test_a_task_of_which_nothing_was_trained_is_dropped_and_not_called_trained(manager: RolloutManager) -> None:
    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
        reasons = [StopReason.DONE, StopReason.ENV_ERROR if group_id.endswith("1") else StopReason.DONE]
        return Group(group_id, task, [episode(group_id, i, task, reason) for i, reason in enumerate(reasons)])

    manager.runner = SimpleNamespace(run_group=run_group)
    _, (batch,) = await manager.generate(0)
    assert set(batch.group_ids) == {"g00000000", "g00000002"}
    await manager.mark_trained()
    counts = manager.buffer.counts
    assert (counts["issued"], counts["trained"], counts["dropped"], counts["in_flight"]) == (3, 2, 1, 0)


async def test_a_rollout_ends_at_once_when_no_engine_can_be_had(manager: RolloutManager) -> None:
    cancelled = []

    async def run_group(*args: Any, **kwargs: Any) -> Group:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        raise AssertionError

    manager.runner = SimpleNamespace(run_group=run_group)
    manager.pool.broken = "no engine runs"
    with pytest.raises(EngineError, match="no engine runs"):
        await asyncio.wait_for(manager.generate(0), 20)
    await asyncio.sleep(0)
    assert len(cancelled) == 3


async def test_wrong_data_does_not_wait_for_engines(manager: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowPool(Pool):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.ended = asyncio.Event()
            made.append(self)

        async def start(self) -> None:
            await self.ended.wait()
            raise EngineError("stopped while it started")

        async def stop(self) -> None:
            self.ended.set()

    def no_data() -> None:
        raise DataError("a line is no JSON")

    made: list[SlowPool] = []
    monkeypatch.setattr("agentrl.rollout.pool.EnginePool", SlowPool)
    monkeypatch.setattr(module, "engine_spec", lambda cfg, model: None)
    monkeypatch.setattr(manager, "_open_data", no_data)
    with pytest.raises(DataError, match="no JSON"):
        await asyncio.wait_for(manager.start(), 20)
    assert made[0].ended.is_set()


@pytest.mark.parametrize(("gpu", "ranks"), [(True, 2), (False, 1)])
def test_weight_sync_counts_the_ranks_of_an_engine(
    manager: RolloutManager, monkeypatch: pytest.MonkeyPatch, gpu: bool, ranks: int
) -> None:
    manager.cfg = manager.cfg.replace(rollout_num_gpus_per_engine=2)
    manager.pool.attach = lambda sync: None
    monkeypatch.setattr(module, "has_gpu", lambda: gpu)
    with patch("agentrl.trainer.weight_sync.WeightSync") as sync:
        manager._attach([])
    given = sync.call_args.kwargs
    assert (given["engine_ranks"], given["backend"]) == (ranks, "nccl" if gpu else "gloo")
