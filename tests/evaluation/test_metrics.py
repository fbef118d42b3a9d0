import math

import numpy as np
import pytest

from agentrl.evaluation.metrics import clustered, summarize, wilson
from agentrl.types import StopReason, Task, Trajectory


def trajectory(task: str, success: bool | None, reward: float = 0.0, stop: StopReason = StopReason.DONE) -> Trajectory:
    return Trajectory("id", "g", Task(task, 0, "test"), [], [], reward=reward, success=success, stop_reason=stop)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Values of the published worked examples of the score interval.
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_wilson_matches_known_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-4)


def test_clustered_error_equals_plain_error_when_each_task_has_one_episode():
    values = np.array([1.0, 2.0, 4.0, 8.0])
    estimate = clustered({str(i): [v] for i, v in enumerate(values)}, binary=False)
    assert estimate.stderr == pytest.approx(values.std(ddof=1) / 2)


def test_repeating_an_episode_adds_no_information():
    once = clustered({"a": [1.0], "b": [0.0], "c": [1.0]}, binary=False)
    thrice = clustered({"a": [1.0] * 3, "b": [0.0] * 3, "c": [1.0] * 3}, binary=False)
    assert thrice.stderr == pytest.approx(once.stderr)


def test_infrastructure_errors_are_counted_beside_the_score():
    summary = summarize(
        "search", "test",
        [trajectory("a", True, 1.0), trajectory("b", False), trajectory("c", None, stop=StopReason.ENGINE_ERROR)], 1.0,
    )  # fmt: skip
    assert summary.errors == 1
    assert summary.success.mean == 0.5
    assert summary.success.n == 2
    assert summary.stop_reasons == {"done": 2, "engine_error": 1}


def test_without_a_success_flag_a_positive_reward_counts():
    assert summarize("x", "test", [trajectory("a", None, 0.3), trajectory("b", None, 0.0)], 1.0).success.mean == 0.5


def test_no_episode_at_all_is_nan_not_zero():
    summary = summarize("x", "test", [trajectory("a", None, stop=StopReason.ENV_ERROR)], 1.0)
    assert math.isnan(summary.success.mean)
