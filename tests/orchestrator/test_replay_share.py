"""``--replay-share``: groups of earlier rollouts in a batch, with the account, the stored rollouts and a resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.algorithms import TrainBatch
from agentrl.config import load_config
from agentrl.data.experience import REPLAY
from agentrl.data.store import TrajectoryStore
from agentrl.orchestrator.stored import StoredRollouts
from agentrl.types import Group, Task
from tests.orchestrator.test_manager import episode, made

FLAGS = ("--rollout-batch-size", "4", "--replay-share", "0.25", "--replay-buffer-size", "2",
         "--buffer-filter-path", "stratified")  # fmt: skip


def manager(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    manager = made(folder, monkeypatch, *FLAGS, tasks=50)
    version = [0]

    async def run_group(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
        parts = [episode(group_id, i, task) for i in range(n)]
        for part in parts:
            part.segments[0].versions[1] = version[0]
        return Group(group_id, task, parts)

    manager.runner, manager.version = SimpleNamespace(run_group=run_group), version
    return manager


async def train(manager: Any, step: int) -> tuple[TrainBatch, dict[str, float]]:
    manager.version[0] = step
    metrics, (batch,), *_ = await manager.generate(step)
    await manager.mark_trained({"advantage": np.where(batch.loss_mask, 1.0 + step, 0).astype(np.float32)})
    return batch, metrics


def own(batch: TrainBatch) -> list[str]:
    return list(dict.fromkeys(batch.group_ids))


async def test_a_batch_has_groups_of_earlier_rollouts_and_the_account_has_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = manager(tmp_path / "a", monkeypatch)
    batches = [await train(straight, step) for step in range(5)]
    seen: set[str] = set()
    for step, (batch, metrics) in enumerate(batches):
        new = [name for name in own(batch) if name not in seen]
        assert len(own(batch)) == 4 and len(new) == (4 if step == 0 else 3) and own(batch)[: len(new)] == new
        assert metrics["rollout/trained_again"] == 4 - len(new) and metrics["rollout/reward"] == 0.5
        for name in own(batch)[len(new) :]:
            versions = batch["versions"][batch.group == own(batch).index(name)]
            assert step - 2 <= versions.max() < step, "log-probabilities and versions of the engine that sampled it"
        seen |= {*new}
    counts = straight.account.counts
    assert (counts["issued"], counts["trained"], counts["in_flight"]) == (16, 16, 0)
    again = [t for step in range(1, 5) for t in straight.store.read(REPLAY, step=step)]
    assert {t.advantage for t in again} == {2.0, 3.0, 4.0, 5.0}
    # The same batches are made of what is stored.
    monkeypatch.setattr("ray.put", lambda batch: batch, raising=False)
    stored = StoredRollouts(load_config(["--load-debug-rollout-data", str(tmp_path / "a"), *FLAGS[:2]]))
    for step, (batch, _) in enumerate(batches):
        _, (made_again,), *_ = await stored.generate(step, progress=None)  # type: ignore[arg-type, misc]
        assert made_again.trajectory_ids == batch.trajectory_ids
        assert all((made_again[name] == batch[name]).all() for name in ("rollout", "versions"))


async def test_a_run_that_goes_on_takes_the_same_groups_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, killed = manager(tmp_path / "a", monkeypatch), manager(tmp_path / "b", monkeypatch)
    for step in range(3):
        await train(straight, step)
        await train(killed, step)
    state = json.loads(json.dumps(await killed.state(str(tmp_path / "c"))))
    await train(killed, 3)  # is not in the checkpoint
    again = manager(tmp_path / "b", monkeypatch)
    await again.load_state(state, str(tmp_path / "c"))
    TrajectoryStore(tmp_path / "b" / "trajectories").rewind(3)
    assert not list(again.store.read(REPLAY, step=3))
    for step in (3, 4):
        assert (await train(again, step))[0].trajectory_ids == (await train(straight, step))[0].trajectory_ids
