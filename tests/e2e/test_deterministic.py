"""``agentrl train --deterministic``: two runs give the same tokens and weights, bit for bit."""

import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl.data.store import TrajectoryStore

FLAGS = [
    "train", "--env", "search", "--deterministic", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4",
    "--rollout-max-response-len", "40", "--num-rollout", "2", "--save-interval", "1", "--eval-interval", "0",
]  # fmt: skip

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def played(run: Path, step: int) -> list[tuple]:
    """Every episode of a rollout, in order: ids, tokens, log-probabilities, reward."""
    return [
        (t.trajectory_id, t.task.task_id, t.reward, str(t.stop_reason), t.messages)
        + tuple((s.tokens.tobytes(), s.logprobs.tobytes(), s.loss_mask.tobytes()) for s in t.segments)
        for t in TrajectoryStore(run / "trajectories").read("train", step=step)
    ]


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Weights, moments and the exported model."""
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        ours, theirs = load_file(one / file), load_file(other / file)
        assert ours.keys() == theirs.keys()
        different = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
        assert not different, f"{file}: {different}"


def moved(run: Path) -> float:
    first, second = (load_file(run / f"checkpoints/step_00000{n}/hf/model.safetensors") for n in (1, 2))
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def test_runs_are_equal_bit_for_bit_whatever_is_in_flight_whoever_plays_it_and_whose_the_devices_are(start, tmp_path):
    one, other, shared = tmp_path / "one", tmp_path / "other", tmp_path / "shared"
    command = start(*FLAGS, "--output-dir", str(one))
    assert command.wait() == 0, command.text[-3000:]
    # Other batches for engine and cache, in another order, played by other processes.
    command = start(*FLAGS, "--rollout-concurrency", "3", "--rollout-num-workers", "2", "--output-dir", str(other))
    assert command.wait() == 0, command.text[-3000:]
    command = start(*FLAGS, "--colocate", "--eval-interval", "2", "--eval-tasks", "2", "--output-dir", str(shared))
    assert command.wait() == 0, command.text[-3000:]
    assert "gave their memory back" in (shared / "logs/rollout-manager.log").read_text()
    assert "gave the memory of the device back" in (shared / "logs/trainer-0.log").read_text()
    for step in (0, 1):
        episodes = played(one, step)
        assert len(episodes) == 8 and episodes == played(other, step) == played(shared, step)
        assert len({tokens for *_, (tokens, _, _) in episodes}) > 2  # the episodes of a task differ: seeds are heeded
    for run in (other, shared):
        assert_same_checkpoint(one / "checkpoints/step_000002", run / "checkpoints/step_000002")
    assert moved(one) > 0


def test_a_killed_run_that_goes_on_equals_a_straight_one_on_other_engines(start, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    command = start(*FLAGS, "--output-dir", str(straight))
    assert command.wait() == 0, command.text[-3000:]
    command = start(*FLAGS, "--rollout-num-engines", "2", "--router-policy", "random", "--output-dir", str(broken))
    command.wait_until((broken / "checkpoints/step_000001").is_dir)
    command.signal(signal.SIGKILL)
    command.wait()
    again = start("train", "--load", str(broken))
    assert again.wait() == 0, again.text[-3000:]
    for step in (0, 1):
        assert played(straight, step) == played(broken, step)
    assert_same_checkpoint(straight / "checkpoints/step_000002", broken / "checkpoints/step_000002")
