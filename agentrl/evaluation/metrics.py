"""Numbers of a held-out evaluation: success with its interval, clustered by task.

Episodes of one task are not independent, so every interval here treats the *task* as the unit
(cluster-robust standard error, as in Miller 2024, "Adding Error Bars to Evals", section 2.2).
Episodes that ended for reasons of infrastructure are counted beside the score, never inside it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.types import Outcome, Trajectory

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its 95 % interval; ``n_tasks`` tasks, ``n`` episodes."""

    mean: float
    low: float
    high: float
    stderr: float
    n_tasks: int
    n: int


@dataclass(frozen=True)
class EvalSummary:
    """What one held-out set gave. ``success`` is a rate, rates are in [0, 1]."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927): right near 0 and 1 where the normal one is not."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    scale = 1 / (1 + Z95**2 / n)
    center = scale * (p + Z95**2 / (2 * n))
    half = scale * Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    return max(0.0, center - half), min(1.0, center + half)


def clustered(values: dict[str, list[float]], *, binary: bool) -> Estimate:
    """Mean over all episodes with a standard error clustered by task.

    Args:
        values: for each task id, one value an episode.
        binary: values are 0 or 1; with one episode a task the interval is Wilson's.
    """
    n_tasks = len(values)
    n = sum(len(v) for v in values.values())
    if n == 0:
        return Estimate(float("nan"), float("nan"), float("nan"), float("nan"), 0, 0)
    mean = sum(sum(v) for v in values.values()) / n
    residuals = sum(sum(x - mean for x in v) ** 2 for v in values.values())
    correction = n_tasks / (n_tasks - 1) if n_tasks > 1 else 1.0
    stderr = math.sqrt(correction * residuals) / n
    if binary and n == n_tasks:
        low, high = wilson(round(mean * n), n)
    else:
        low, high = mean - Z95 * stderr, mean + Z95 * stderr
        if binary:
            low, high = max(0.0, low), min(1.0, high)
    return Estimate(mean, low, high, stderr, n_tasks, n)


def summarize(name: str, split: str, trajectories: Sequence[Trajectory], seconds: float) -> EvalSummary:
    """Reduce trajectories of one held-out set. An env without ``success`` counts reward > 0 as success."""
    scored = [t for t in trajectories if t.outcome is not Outcome.INFRA_ERROR]
    success: dict[str, list[float]] = defaultdict(list)
    reward: dict[str, list[float]] = defaultdict(list)
    for trajectory in scored:
        solved = trajectory.success if trajectory.success is not None else trajectory.reward > 0
        success[trajectory.task.task_id].append(float(solved))
        reward[trajectory.task.task_id].append(float(trajectory.reward))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else float("nan")

    return EvalSummary(
        name=name,
        split=split,
        success=clustered(success, binary=True),
        reward=clustered(reward, binary=False),
        turns=mean([t.num_turns for t in scored]),
        tool_calls=mean([len(t.tool_calls) for t in scored]),
        tokens=mean([t.num_sampled for t in scored]),
        truncation_rate=mean([float(t.outcome is Outcome.TRUNCATED) for t in scored]),
        errors=len(trajectories) - len(scored),
        stop_reasons=dict(Counter(str(t.stop_reason) for t in trajectories)),
        seconds=seconds,
    )
