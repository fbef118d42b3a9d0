"""What is said of a run that goes on and does not go well."""

import io

import numpy as np
from rich.console import Console

from agentrl.algorithms import zero_variance_fraction
from agentrl.config import load_config, load_eval_config
from agentrl.config.presets import demo_alone
from agentrl.orchestrator.metrics import rollout_metrics
from agentrl.orchestrator.notices import Lasting, lost_episodes, nothing_to_learn, steps_left_out
from agentrl.progress import Progress
from agentrl.types import Group, Segment, StopReason, Task, Trajectory
from tests.trainer.samples import credited


def group(name, *rewards, stop=StopReason.DONE, success=None):
    task = Task("task", 0)
    one, mask = np.ones(3), np.array([0, 1, 1], np.uint8)
    segment = Segment(one.astype(np.int32), mask, one.astype(np.float32), one.astype(np.int32), 2)
    error = "reward is nan" if stop is StopReason.ENV_ERROR else None
    episodes = [
        Trajectory(f"{name}{n}", name, task, [segment], [], reward=r, stop_reason=stop, success=success, error=error)
        for n, r in enumerate(rewards)
    ]
    return Group(name, task, episodes)


def metrics(*groups):
    batch = credited(groups)
    return rollout_metrics(groups, 0) | {"rollout/zero_variance": zero_variance_fraction(batch)}


def test_equal_rewards_teach_nothing():
    text = nothing_to_learn(metrics(group("a", 0, 0), group("b", 0, 0)))
    assert "teaches nothing" in text and "mean 0.000" in text and "agentrl show" in text
    assert "harder tasks" in nothing_to_learn(metrics(group("a", 1, 1, success=True)))
    assert nothing_to_learn(metrics(group("a", 0, 0), group("b", 0, 1))) is None


def test_steps_that_were_left_out_are_said():
    assert steps_left_out({"train/steps_skipped": 0.0}) is None
    text = steps_left_out({"train/steps_skipped": 2.0, "critic/steps_skipped": 1.0})
    assert "2 of the policy and 1 of the critic: a gradient was not finite" in text
    assert "1 of the policy: every gradient was 0" in steps_left_out({"train/steps_empty": 1.0})


def test_lost_episodes_are_counted_with_their_error():
    fine, lost = group("a", 1, 0), group("b", 0, 0, stop=StopReason.ENV_ERROR)
    assert lost_episodes([fine]) is None
    text = lost_episodes([fine, lost])
    assert text.startswith("2 of 4 episodes were lost") and "env_error: reward is nan" in text


def test_what_lasts_is_not_said_at_every_step():
    lasting = Lasting()
    said = [lasting.say("x", "bad") for _ in range(9)]
    assert [n for n, text in enumerate(said, 1) if text] == [1, 2, 4, 8] and "for 8 rollouts now" in said[7]
    assert lasting.say("y", "other") == "other"
    assert lasting.say("x", None) is None and lasting.say("x", "bad") == "bad"


def test_without_a_terminal_a_line_says_now_and_then_how_far_it_is(monkeypatch):
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr("agentrl.progress.time.monotonic", lambda: now[0])
    with Progress("x", 1, console=Console(file=out, width=200)) as progress:
        progress.stage("rollout")
        for _ in range(40):
            now[0] += 1
            progress.counted(3, 9)
        progress.counted(3, 9, "the wiki is away for 12 s")
        assert progress.detail == "3 of 9 episodes, no more begin: the wiki is away for 12 s"
        progress.warn("careful")
        progress.warn(None)
    lines = out.getvalue().splitlines()
    assert sum("rollout: 3 of 9 episodes" in line for line in lines) == 2
    assert lines[-1].endswith("warning: careful")


def test_the_demo_model_is_for_its_own_world():
    assert demo_alone(load_config(["--env", "search"])) is None
    assert "--hf-checkpoint" in demo_alone(load_config(["--env", "calculator"]))
    assert demo_alone(load_config(["--env", "search", "--env-arg", "train_data=x.jsonl"]))
    assert demo_alone(load_eval_config(["--env", "search"])) is None
    assert demo_alone(load_eval_config(["--env", "search,textgame"]))
    assert demo_alone(load_eval_config(["--env", "search", "--base-url", "http://127.0.0.1:1/v1"])) is None
