"""Partial rollouts on the real stack: the embedded model learns, and every task is accounted for."""

import json

import pytest

from agentrl.orchestrator.audit import audit

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def test_the_demo_learns_from_the_groups_that_finish_first(start, tmp_path):
    run = tmp_path / "run"
    command = start(
        *("train", "--env", "search", "--output-dir", str(run), "--num-rollout", "6", "--eval-interval", "6"),
        *("--partial-rollout", "--over-sampling-batch-size", "24", "--max-staleness", "2"),
        *("--rollout-num-workers", "2", "--eval-tasks", "100"),
    )
    assert command.wait(560) == 0, command.text[-3000:]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "train/loss" in line]
    assert sum(step.get("rollout/carried", 0.0) for step in steps) > 0
    assert all(step["data/in_flight"] > 0 and step["rollout/staleness_max"] <= 2 for step in steps)
    success = [line["eval/search/success"] for line in metrics if "eval/search/success" in line]
    assert success[0] < 0.6 and success[-1] >= 0.8, success
    assert audit(run) == []
