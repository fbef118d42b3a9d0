"""Numbers of a held-out evaluation: success with its interval, clustered by task, pass@k and pass^k, and counts.

Episodes of one task are not independent, so every interval here treats the *task* as the unit
(cluster-robust standard error, as in Miller 2024, "Adding Error Bars to Evals", section 2.2).
Episodes that ended for reasons of infrastructure are counted beside the score, never inside it.
An episode of several agents counts once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.types import Outcome, Trajectory

Z95 = 1.959963984540054


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
    if degrees < 1:
        return math.nan
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
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
    values = {task: v for task, v in values.items() if v}
    n_tasks = len(values)
    n = sum(len(v) for v in values.values())
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    mean = sum(sum(v) for v in values.values()) / n
    stderr = math.nan
    if n_tasks > 1:
        residuals = sum(sum(x - mean for x in v) ** 2 for v in values.values())
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


def by_episode(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of each episode: one, or one for each of its agents."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.episode_id, []).append(trajectory)
    return list(found.values())


def is_whole(episode: Sequence[Trajectory]) -> bool:
    """Whether all agents of an episode are there: a kill may have come between the lines of two of them."""
    first = episode[0]
    return first.episode_id == first.trajectory_id or len(episode) == len(first.info.get("episode_agents", episode))


def is_error(episode: Sequence[Trajectory]) -> bool:
    """Whether an episode ended for reasons of infrastructure."""
    return any(t.outcome is Outcome.INFRA_ERROR for t in episode)


def solved(episode: Sequence[Trajectory]) -> bool:
    """What the environment said; where it said nothing, a completed episode with a reward above 0."""
    said = [t.success for t in episode if t.success is not None]
    return any(said) if said else _reward(episode) > 0


def _reward(episode: Sequence[Trajectory]) -> float:
    return math.fsum(t.reward for t in episode) / len(episode)


def summarize(
    name: str, split: str, trajectories: Sequence[Trajectory], seconds: float, *, planned: int = 0
) -> EvalSummary:
    """Reduce the trajectories of one held-out set.

    Args:
        planned: episodes that were asked for; 0: those that are there.
    """
    episodes = by_episode(trajectories)
    scored = [e for e in episodes if not is_error(e)]
    success = _values(scored, lambda e: float(solved(e)))

    def mean(value: Callable[[Sequence[Trajectory]], float]) -> float:
        return math.fsum(map(value, scored)) / len(scored) if scored else math.nan

    return EvalSummary(
        name=name,
        split=split,
        success=clustered(success, binary=True),
        reward=clustered(_values(scored, _reward), binary=False),
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
        reward_parts=_parts(scored),
        categories=_categories(episodes),
        agents=_agents(scored),
        planned=planned or len(episodes),
    )


def _values(episodes: Iterable[Sequence[Trajectory]], value: Callable[[Any], float]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        values[episode[0].task.task_id].append(value(episode))
    return values


def _over_k(success: dict[str, list[float]], estimator: Callable[[int, int, int], float]) -> dict[str, Estimate]:
    """For k = 1, 2, 4 ...: the mean over the tasks that have at least k scored episodes; none when each has one."""
    most = max(map(len, success.values()), default=0)
    estimates = {}
    k = 1
    while most > 1 and k <= most:
        of_tasks = {
            task: [estimator(len(v), round(sum(v)), k)] for task, v in success.items() if len(v) >= k
        }  # fmt: skip
        e = clustered(of_tasks, binary=False)
        low, high = max(e.low, 0.0), min(e.high, 1.0)  # NaN, of one task, stays
        estimates[str(k)] = Estimate(e.mean, low, high, e.stderr, e.n_tasks, sum(len(success[t]) for t in of_tasks))
        k *= 2
    return estimates


def _parts(episodes: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Mean of each named part of the reward; an episode that did not earn a part has 0 of it."""
    trajectories = [t for e in episodes for t in e]
    names = {name: None for t in trajectories for name in t.rewards}
    return {
        name: math.fsum(t.rewards.get(name) or 0.0 for t in trajectories) / len(trajectories) for name in names
    }  # fmt: skip


def _categories(episodes: Sequence[Sequence[Trajectory]]) -> dict[str, Category]:
    groups: dict[str, list[Sequence[Trajectory]]] = defaultdict(list)
    for episode in episodes:
        category = next((t.info["category"] for t in episode if t.info.get("category") is not None), None)
        if category is not None:
            groups[str(category)].append(episode)
    found = {}
    for category, members in sorted(groups.items()):
        scored = [e for e in members if not is_error(e)]
        found[category] = Category(
            clustered(_values(scored, lambda e: float(solved(e))), binary=True),
            clustered(_values(scored, _reward), binary=False),
            len(members) - len(scored),
        )
    return found


def _agents(episodes: Sequence[Sequence[Trajectory]]) -> dict[str, Estimate]:
    if all(len(e) == 1 for e in episodes):
        return {}
    rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in (t for e in episodes for t in e):
        rewards[trajectory.agent][trajectory.task.task_id].append(trajectory.reward)
    return {agent: clustered(values, binary=False) for agent, values in rewards.items()}
