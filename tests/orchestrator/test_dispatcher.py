"""The order in which groups finish decides nothing in the sink."""

from __future__ import annotations

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
from agentrl.orchestrator.sink import Sink
from agentrl.tasks.source import TaskSource
from agentrl.types import Group, Segment, StopReason, Trajectory


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
        store=TrajectoryStore(tmp_path / "trajectories"), size=4, at_once=4,
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
