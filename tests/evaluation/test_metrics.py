import itertools
import math

import numpy as np
import pytest

from agentrl.evaluation.metrics import clustered, pass_at_k, pass_hat_k, summarize, t95, wilson
from agentrl.types import StopReason, Task, Trajectory

NUMBERS = itertools.count()


def trajectory(task: str, success: bool | None, reward: float = 0.0, stop: StopReason = StopReason.DONE, **fields):
    fields = {"trajectory_id": f"e{next(NUMBERS)}", "segments": [], "messages": [], **fields}
    return Trajectory(
        group_id=task, task=Task(task, 0, "test"), reward=reward, success=success, stop_reason=stop, **fields
    )


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


# -- pass@k and pass^k ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_and_pass_hat_k_against_all_draws(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
        assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@pytest.mark.parametrize("k", [0, 4])
def test_more_draws_than_episodes_are_an_error(k):
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match=f"k is {k}, of 3"):
            estimator(3, 1, k)


def test_k_goes_in_powers_of_two_and_leaves_out_tasks_with_too_few_episodes():
    episodes = [trajectory("a", i < 2) for i in range(4)] + [trajectory("b", True) for _ in range(3)]
    episodes.append(trajectory("b", None, stop=StopReason.TOOL_ERROR))
    summary = summarize("x", "test", episodes, 1.0)
    assert list(summary.pass_at_k) == list(summary.pass_hat_k) == ["1", "2", "4"]
    assert summary.pass_at_k["1"].mean == summary.pass_hat_k["1"].mean == pytest.approx((0.5 + 1) / 2)
    assert summary.pass_at_k["2"].mean == pytest.approx((5 / 6 + 1) / 2)
    assert summary.pass_hat_k["2"].mean == pytest.approx((1 / 6 + 1) / 2)
    assert (summary.pass_at_k["4"].mean, summary.pass_at_k["4"].n_tasks, summary.pass_hat_k["4"].mean) == (1, 1, 0)
    assert summarize("x", "test", [trajectory("a", True), trajectory("b", True)], 1.0).pass_at_k == {}


# -- intervals -----------------------------------------------------------------------------------------


def cluster_robust_stderr(values: list[list[float]]) -> float:
    """Of an ordinary least-squares fit of a constant, written out: bread, meat, bread, and the CR1 factor."""
    x = np.ones((sum(map(len, values)), 1))
    y = np.concatenate(values)
    beta = np.linalg.lstsq(x, y, rcond=None)[0]
    bread = np.linalg.inv(x.T @ x)
    residuals = y - x @ beta
    meat, start = np.zeros((1, 1)), 0
    for group in values:
        rows = slice(start, start + len(group))
        score = x[rows].T @ residuals[rows]
        meat += np.outer(score, score)
        start += len(group)
    groups, n, k = len(values), len(y), 1
    factor = groups / (groups - 1) * (n - 1) / (n - k)
    return float(np.sqrt(factor * (bread @ meat @ bread)[0, 0]))


def test_the_standard_error_is_the_cluster_robust_one_of_a_regression():
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = [list(rng.random(rng.integers(1, 6)) + rng.normal()) for _ in range(rng.integers(2, 9))]
        estimate = clustered({str(i): v for i, v in enumerate(values)}, binary=False)
        assert estimate.stderr == pytest.approx(cluster_robust_stderr(values))


def test_the_interval_of_success_covers_the_truth_as_often_as_it_says():
    """Each task has its own rate, drawn anew in each of many evaluations; four episodes of each of 60 tasks."""
    rng = np.random.default_rng(1)
    covered, rounds = 0, 400
    for _ in range(rounds):
        rates = rng.beta(0.5, 0.5, size=60)  # the mean of this distribution is one half
        values = {str(i): list(map(float, rng.random(4) < rate)) for i, rate in enumerate(rates)}
        estimate = clustered(values, binary=True)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / rounds <= 0.98


def test_no_failure_seen_is_no_certainty():
    estimate = clustered({str(i): [1.0] * 4 for i in range(20)}, binary=True)
    assert (estimate.mean, estimate.high) == (1.0, 1.0)
    assert estimate.low == pytest.approx(wilson(20, 20)[0]), "80 episodes of 20 tasks that agree are worth 20"


def test_of_one_task_nothing_can_be_said():
    reward = clustered({"a": [1.0, 2.0]}, binary=False)
    assert reward.mean == 1.5 and math.isnan(reward.stderr) and math.isnan(reward.low)
    success = clustered({"a": [1.0, 1.0]}, binary=True)
    assert success.high - success.low > 0.7


# -- what else a summary says --------------------------------------------------------------------------


def test_categories_parts_and_rates():
    episodes = [
        trajectory("a", True, 1.0, info={"category": "easy"}, rewards={"exact": 1.0}),
        trajectory("b", False, 0.5, info={"category": "hard"}, rewards={"format": 0.5}, stop=StopReason.MAX_TURNS),
        trajectory("c", None, info={"category": "hard"}, stop=StopReason.ENGINE_ERROR),
        trajectory("d", True, 1.0),
    ]
    summary = summarize("x", "test", episodes, 1.0, planned=6)
    assert summary.reward_parts == {"exact": pytest.approx(1 / 3), "format": pytest.approx(0.5 / 3)}
    assert {name: (c.success.mean, c.errors) for name, c in summary.categories.items()} == {
        "easy": (1.0, 0),
        "hard": (0.0, 1),
    }
    assert summary.truncation_rate == pytest.approx(1 / 3)
    values = summary.to_dict()
    assert (values["episodes"], values["not_attempted"], values["complete"]) == (4, 2, False)
    assert values["error_rate"] == 0.25
    assert values["categories"]["easy"]["success"]["n"] == 1


def test_an_episode_of_several_agents_counts_once():
    def seat(agent: str, episode: int, reward: float, success: bool | None, **fields):
        info = {"episode_id": f"e{episode}", "turns": [{"sampled_tokens": 10}]}
        return trajectory(
            f"task{episode}", success, reward, agent=agent, trajectory_id=f"e{episode}:{agent}", info=info,
            num_turns=2, tool_calls=[{}], timings={"total": 3.0}, **fields,
        )  # fmt: skip

    episodes = [seat("buyer", 0, 1.0, True), seat("seller", 0, -1.0, None), seat("buyer", 1, -1.0, False),
                seat("seller", 1, 1.0, None)]  # fmt: skip
    summary = summarize("x", "test", episodes, 1.0)
    assert (summary.success.n, summary.success.mean, summary.reward.mean) == (2, 0.5, 0.0)
    assert (summary.turns, summary.tool_calls, summary.tokens, summary.episode_seconds) == (4.0, 2.0, 20.0, 3.0)
    assert {name: e.mean for name, e in summary.agents.items()} == {"buyer": 0.0, "seller": 0.0}
    assert summary.stop_reasons == {"done": 2}
    broken = [*episodes[:3], seat("seller", 1, 0.0, None, stop=StopReason.ENGINE_ERROR)]
    assert (summarize("x", "test", broken, 1.0).errors, summarize("x", "test", broken, 1.0).success.n) == (1, 1)


@pytest.mark.parametrize(
    # Of the usual table of Student's distribution.
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (30, 2.0423), (999, 1.9623)],
)  # fmt: skip
def test_students_quantile(degrees, quantile):
    assert t95(degrees) == pytest.approx(quantile, rel=2e-3)
    assert math.isnan(t95(0))


def test_few_tasks_have_a_wide_interval_of_the_reward():
    """Of five tasks with normal rewards, 1.96 standard errors would hold the truth in 88 of 100 evaluations."""
    rng = np.random.default_rng(0)
    estimates = [clustered({str(i): [x] for i, x in enumerate(rng.normal(size=5))}, binary=False) for _ in range(4000)]
    assert np.mean([e.low <= 0 <= e.high for e in estimates]) == pytest.approx(0.95, abs=0.01)


def test_tasks_that_are_alike_do_not_count_for_more_than_their_episodes():
    """One of three in every task: no spread between tasks, and the interval of nine independent episodes."""
    alike = clustered({str(i): [1.0, 0.0, 0.0] for i in range(3)}, binary=True)
    assert (alike.low, alike.high) == pytest.approx(wilson(3, 9))
    half = clustered({str(i): [1.0, 0.0] for i in range(4)}, binary=True)
    assert (half.low, half.high) == pytest.approx(wilson(4, 8))


def test_the_ends_of_wilsons_interval_are_exact():
    for n in range(1, 60):
        assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0
