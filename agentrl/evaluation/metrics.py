"""Numbers of a held-out evaluation: success with its interval, clustered by task, pass@k and pass^k, and counts.

Episodes of one task are not independent, so every interval here treats the *task* as the unit
(cluster-robust standard error, as in Miller 2024, "Adding Error Bars to Evals", section 2.2).
Episodes that ended for reasons of infrastructure are counted beside the score, never inside it.
An episode of several agents counts once.

The distributions are written out: scipy, which has them, is 100 MB that the light install does without.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

from agentrl.data.episodes import Episode, by_episode, is_error, reward_of, solved
from agentrl.types import Outcome, Trajectory

Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its 95 % interval; ``n_tasks`` tasks, ``n`` episodes. NaN where there is too little."""

    mean: float
    low: float
    high: float
    stderr: float
    n_tasks: int
    n: int


@dataclass(frozen=True)
class Category:
    """The score of the tasks of one kind (``info["category"]``)."""

    success: Estimate
    reward: Estimate
    errors: int


@dataclass(frozen=True)
class EvalSummary:
    """What one held-out set gave. ``success`` is a rate, rates are in [0, 1], other numbers are means of an episode.

    ``pass_at_k`` and ``pass_hat_k``: k (as text) -> estimate, for k in powers of two up to the episodes of a task.
    ``agents``: with several agents in an episode, the mean reward of each. ``planned``: episodes that were asked for.
    """

    name: str
    split: str
    success: Estimate
    reward: Estimate
    turns: float
    tool_calls: float
    tokens: float
    truncation_rate: float
    errors: int
    stop_reasons: dict[str, int]
    seconds: float
    episode_seconds: float = math.nan
    pass_at_k: dict[str, Estimate] = field(default_factory=dict)
    pass_hat_k: dict[str, Estimate] = field(default_factory=dict)
    reward_parts: dict[str, float] = field(default_factory=dict)
    categories: dict[str, Category] = field(default_factory=dict)
    agents: dict[str, Estimate] = field(default_factory=dict)
    planned: int = 0

    @property
    def episodes(self) -> int:
        """Episodes that ended, scored or not."""
        return self.success.n + self.errors

    @property
    def not_attempted(self) -> int:
        """Episodes that were asked for and not played (a time limit, an interruption)."""
        return max(self.planned - self.episodes, 0)

    @property
    def complete(self) -> bool:
        """Whether every episode asked for was played to an end that counts."""
        return self.not_attempted == 0 and self.errors == 0 and self.success.n > 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready copy, with the properties."""
        counts = {name: getattr(self, name) for name in ("episodes", "not_attempted", "complete")}
        return {**asdict(self), **counts, "error_rate": self.errors / self.episodes if self.episodes else math.nan}


def wilson(successes: float, n: float) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927): right near 0 and 1 where the normal one is not."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    scale = 1 / (1 + Z95**2 / n)
    center = scale * (p + Z95**2 / (2 * n))
    half = scale * Z95 * math.sqrt(max(p * (1 - p), 0.0) / n + Z95**2 / (4 * n**2))
    # Exact where rounding would leave the smallest of numbers.
    return 0.0 if p == 0 else max(0.0, center - half), 1.0 if p == 1 else min(1.0, center + half)


def t95(degrees: int) -> float:
    """The 97.5 % quantile of Student's t; NaN for no degree of freedom.

    In closed form for one and two degrees, else the expansion of Abramowitz and Stegun 1964, 26.7.5: within 0.2 %.
    """
    if degrees < 3:
        return (math.nan, math.tan(0.475 * math.pi), 0.95 * math.sqrt(2 / (1 - 0.95**2)))[max(degrees, 0)]
    z, v = Z95, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, start=1))


def clustered(values: dict[str, list[float]], *, binary: bool) -> Estimate:
    """Mean over all episodes with a standard error clustered by task.

    The variance is G/(G-1) · Σ_g (Σ_i (x_gi - mean))² / n² over G tasks, the sandwich estimator of a mean with the
    usual small-sample factor. For binary values the interval is Wilson's at the effective sample size n / design effect
    (Kish 1965), which is n with one episode a task and never more; others have mean ± Student's t of G-1 degrees of
    freedom times the standard error.

    Args:
        values: for each task id, one value an episode.
        binary: values are 0 or 1.
    """
    tasks = [v for v in values.values() if v]
    n_tasks, n = len(tasks), sum(map(len, tasks))
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    mean = sum(map(sum, tasks)) / n
    stderr = math.nan
    if n_tasks > 1:
        residuals = sum(sum(x - mean for x in v) ** 2 for v in tasks)
        stderr = math.sqrt(n_tasks / (n_tasks - 1) * residuals) / n
    if not binary:
        half = t95(n_tasks - 1) * stderr
        return Estimate(mean, mean - half, mean + half, stderr, n_tasks, n)
    effective = float(n_tasks)  # how far episodes of a task agree cannot be seen where all of all tasks do
    if n_tasks > 1 and 0 < mean < 1:
        effective = n / max(1.0, stderr**2 * (n - 1) / (mean * (1 - mean)))
    return Estimate(mean, *wilson(mean * effective, effective), stderr, n_tasks, n)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of ``k`` episodes drawn from ``n``, of which ``c`` succeeded, is a success.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 ("Evaluating Large Language Models Trained on
    Code"), equation 1. Raises ValueError for n < k.
    """
    _check(n, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of ``k`` episodes drawn from ``n``, of which ``c`` succeeded, are successes: reliability.

    C(c, k) / C(n, k), as in Yao et al. 2024 ("tau-bench"), section 3. Raises ValueError for n < k.
    """
    _check(n, k)
    return math.comb(c, k) / math.comb(n, k)


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, of {n} episodes; from 1 to {n} is possible")


def sampled_tokens(trajectory: Trajectory) -> int:
    """Tokens the model wrote; where a server keeps the tokens to itself, as many as it says."""
    if trajectory.segments:
        return trajectory.num_sampled
    return sum(turn.get("sampled_tokens") or 0 for turn in trajectory.info.get("turns") or ())


def summarize(
    name: str, split: str, trajectories: Sequence[Trajectory], seconds: float, *, planned: int = 0
) -> EvalSummary:
    """Reduce the trajectories of one held-out set, of which ``planned`` episodes were asked for (0: those that are
    there)."""
    episodes = by_episode(trajectories)
    scored = [e for e in episodes if not is_error(e)]
    success = by_task(scored, lambda e: float(solved(e)))

    def mean(value: Callable[[Episode], float]) -> float:
        return math.fsum(map(value, scored)) / len(scored) if scored else math.nan

    # Of all trajectories: an episode that did not earn a part has 0 of it.
    parts = dict.fromkeys(name for e in scored for t in e for name in t.rewards)
    agents = dict.fromkeys(t.agent for e in scored for t in e) if any(len(e) > 1 for e in scored) else {}
    kinds: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        category = next((t.info["category"] for t in episode if t.info.get("category") is not None), None)
        if category is not None:
            kinds[str(category)].append(episode)
    return EvalSummary(
        name=name,
        split=split,
        success=clustered(success, binary=True),
        reward=clustered(by_task(scored, reward_of), binary=False),
        turns=mean(lambda e: sum(t.num_turns for t in e)),
        tool_calls=mean(lambda e: sum(len(t.tool_calls) for t in e)),
        tokens=mean(lambda e: sum(map(sampled_tokens, e))),
        truncation_rate=mean(lambda e: float(e[0].outcome is Outcome.TRUNCATED)),
        errors=len(episodes) - len(scored),
        stop_reasons=dict(Counter(str(e[0].stop_reason) for e in episodes)),
        seconds=seconds,
        episode_seconds=mean(lambda e: max(t.timings.get("total", 0.0) for t in e)),
        pass_at_k=_over_k(success, pass_at_k),
        pass_hat_k=_over_k(success, pass_hat_k),
        reward_parts={
            part: math.fsum(t.rewards.get(part) or 0.0 for e in scored for t in e) / sum(map(len, scored))
            for part in parts
        },
        categories={category: _category(members) for category, members in sorted(kinds.items())},
        agents={
            agent: clustered(by_task([[t] for e in scored for t in e if t.agent == agent], reward_of), binary=False)
            for agent in agents
        },
        planned=planned or len(episodes),
    )


def by_task(episodes: Iterable[Episode], value: Callable[[Episode], float]) -> dict[str, list[float]]:
    """Task id -> ``value`` of each of its episodes."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        values[episode[0].task.task_id].append(value(episode))
    return values


def _category(members: Sequence[Episode]) -> Category:
    scored = [e for e in members if not is_error(e)]
    success = clustered(by_task(scored, lambda e: float(solved(e))), binary=True)
    return Category(success, clustered(by_task(scored, reward_of), binary=False), len(members) - len(scored))


def _over_k(success: dict[str, list[float]], estimator: Callable[[int, int, int], float]) -> dict[str, Estimate]:
    """For k = 1, 2, 4 ...: the mean over the tasks that have at least k scored episodes; none when each has one."""
    most = max(map(len, success.values()), default=0)
    estimates = {}
    for k in (2**power for power in range(most.bit_length() if most > 1 else 0)):
        of_tasks = {task: [estimator(len(v), round(sum(v)), k)] for task, v in success.items() if len(v) >= k}
        e = clustered(of_tasks, binary=False)
        low, high = max(e.low, 0.0), min(e.high, 1.0)  # NaN, of one task, stays
        estimates[str(k)] = Estimate(e.mean, low, high, e.stderr, e.n_tasks, sum(len(success[t]) for t in of_tasks))
    return estimates
