"""``agentrl train`` on the real stack: Ray, SGLang, router, Megatron, at the smallest size."""

import json
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from agentrl.data.store import TrajectoryStore

SMALL = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "40"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_syncs_evaluates_saves_and_leaves_nothing_behind(start, tmp_path):
    run = tmp_path / "run"
    command = start(
        "train", "--env", "search", *SMALL, "--num-rollout", "2", "--eval-interval", "2", "--eval-tasks", "4",
        "--save-interval", "2", "--output-dir", str(run),
    )  # fmt: skip
    assert command.wait() == 0, command.text[-3000:]
    steps = [m for m in metrics(run) if "train/loss" in m]
    assert [m["step"] for m in steps] == [1, 2]
    for m in steps:
        assert m["train/logprob_abs_diff_mean"] < 1e-5
        assert m["sync/verified"] > 0 and m["rollout/staleness_max"] == 0
        assert m["data/trained"] + m["data/in_flight"] == m["data/issued"]
    store = TrajectoryStore(run / "trajectories")
    for step in (0, 1):
        for trajectory in store.read("train", step=step):
            for segment in trajectory.segments:
                sampled = segment.loss_mask == 1
                assert set(segment.versions[sampled]) == {step}
                assert (segment.versions[~sampled] == -1).all() and (segment.logprobs[~sampled] == 0).all()
                assert np.isfinite(segment.logprobs).all()
    assert "before → after" in command.text and "what next" in command.text
    assert (run / "reward.png").stat().st_size > 1000
    assert list((run / "tensorboard").iterdir())
    logs = {p.name for p in (run / "logs").iterdir()}
    assert {"driver.log", "engine-0.log", "router.log", "trainer-0.log"} <= logs
    assert command.left_behind() == []


def test_resume_after_kill_loses_no_task_and_trains_none_twice(start, tmp_path):
    run = tmp_path / "run"
    flags = ["--env", "search", *SMALL, "--num-rollout", "6", "--save-interval", "1", "--eval-interval", "0",
             "--output-dir", str(run)]  # fmt: skip
    command = start("train", *flags)
    command.wait_until(lambda: (run / "checkpoints" / "step_000002").is_dir())
    command.signal(signal.SIGKILL)
    command.wait()
    assert command.left_behind() == []

    again = start("train", "--load", str(run))
    assert again.wait() == 0, again.text[-3000:]
    assert Counter(m["step"] for m in metrics(run) if "train/loss" in m) == Counter(range(1, 7))
    groups = [
        (step, t.group_id, t.task.task_id)
        for step in range(6)
        for t in TrajectoryStore(run / "trajectories").read("train", step=step)
    ]
    steps_of_group = {group: {s for s, g, _ in groups if g == group} for _, group, _ in groups}
    assert all(len(steps) == 1 for steps in steps_of_group.values()), "a group was trained in two steps"
    assert len(steps_of_group) == 6 * 2
    assert len({task for _, _, task in groups}) == 6 * 2
    assert again.left_behind() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_ends_clean_and_says_how_to_go_on(start, tmp_path, number, code):
    run = tmp_path / "run"
    command = start(
        "train", "--env", "search", *SMALL, "--num-rollout", "500", "--save-interval", "1", "--eval-interval", "0",
        "--output-dir", str(run),
    )  # fmt: skip
    command.wait_until(lambda: (run / "checkpoints" / "step_000001").is_dir())
    command.signal(number)
    assert command.wait(60) == code, command.text[-3000:]
    assert "agentrl train --load" in command.text
    assert "Traceback" not in command.text
    assert command.left_behind() == []


RAISING = '''
import agentrl


class Broken(agentrl.ToolEnv):
    """It can be made, but no task can be had from it."""

    def task(self, rng, split):
        raise RuntimeError("the database is gone")

    def reward(self, text, answer):
        return 0.0
'''


def test_an_env_that_always_raises_ends_the_run_with_its_error(start, tmp_path):
    (tmp_path / "broken.py").write_text(RAISING)
    command = start("train", "--env", "broken.py:Broken", *SMALL, "--num-rollout", "1", "--eval-interval", "0")
    assert command.wait() == 1
    assert "the database is gone" in command.text and "8 of 8 episodes" in command.text
    assert "Traceback" not in command.text
    assert command.left_behind() == []
