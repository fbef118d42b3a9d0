"""PPO on the real stack: the demo learns with a critic."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]

SETTINGS = [
    *("--advantage-estimator", "ppo", "--num-steps-per-rollout", "4", "--lr", "1e-4"),
    *("--critic-lr", "1e-3", "--value-clip", "0.5"),
]
"""As docs/algorithms.md gives them."""


def test_the_demo_learns_with_ppo(start, tmp_path):
    run = tmp_path / "run"
    command = start(
        "train", "--env", "search", *SETTINGS, "--num-rollout", "4", "--eval-interval", "4", "--no-eval-before-train",
        "--output-dir", str(run),
    )  # fmt: skip
    assert command.wait(1100) == 0, command.text[-3000:]
    (evaluation,) = (json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines())
    assert evaluation["sets"]["search"]["success"]["mean"] >= 0.8
    (checkpoint,) = (run / "checkpoints").glob("step_*4")
    assert sorted(path.name for path in (checkpoint / "trainer").iterdir()) == ["critic", "policy"]
    assert command.left_behind() == []
