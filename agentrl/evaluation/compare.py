"""Two evaluations of the same tasks, compared task by task.

Each task gives one difference: the mean over its episodes in B minus that in A. Their mean is the difference of the
runs, and the spread of the differences (not of the scores) gives its standard error, which is why a paired comparison
sees what two separate intervals do not (Miller 2024, "Adding Error Bars to Evals", section 4.2). With one episode a
task, success is tested by McNemar's exact test and has the interval of Bonett and Price (2012); all else is tested by
flipping the signs of the differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import fmean
from typing import Any

import numpy as np

from agentrl.data.episodes import by_episode, is_error, reward_of, solved
from agentrl.errors import DataError, first_few
from agentrl.evaluation.metrics import Z95, by_task, t95
from agentrl.evaluation.record import PROMPT_ENV, content, task_key
from agentrl.evaluation.results import EvalResult
from agentrl.types import Task, Trajectory

SIGNIFICANT = 0.05
EXACT_UP_TO = 16
"""Differences other than 0 up to which all sign patterns are tried; beyond, ``FLIPS`` random ones."""
FLIPS = 20000
SEED = 0
_CHUNK = 1 << 22
_CONTENT = ("env", "env_args", "split", "code_digest", "data_digest")


@dataclass(frozen=True)
class Paired:
    """One quantity of both runs. ``difference`` is B minus A, with its 95 % interval; ``p`` of the two-sided test."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    stderr: float
    p: float
    test: str

    @property
    def significant(self) -> bool:
        return self.p < SIGNIFICANT


@dataclass(frozen=True)
class Flip:
    """A task on which the runs differ: the mean success of its episodes in each."""

    task_id: str
    a: float
    b: float


@dataclass(frozen=True)
class SetComparison:
    """One held-out set. ``gained`` and ``lost``: tasks that B solves more, or less, often; the largest change first."""

    name: str
    n_tasks: int
    episodes: tuple[int, int]
    errors: tuple[int, int]
    success: Paired
    reward: Paired
    gained: list[Flip]
    lost: list[Flip]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Why tasks are not compared -> their ids."""
    notes: list[str] = field(default_factory=list)


def compare(
    a: EvalResult, b: EvalResult, *, sets: Sequence[str] = (), intersect: bool = False, force: bool = False
) -> list[SetComparison]:
    """Compare ``sets``, or all that both evaluations have. ``intersect``: where their tasks differ, those of both.
    ``force``: although environment, code or data have changed.
    Raises DataError: there is nothing that can be compared; the text says what differs."""
    both = [name for name in a.sets if name in b.sets]
    if not both:
        b, both = _renamed(a, b)
    unknown = [name for name in sets if name not in both]
    if unknown or not both:
        what = f"set {unknown[0]!r} is not in both runs" if unknown else "the runs have no set in common"
        raise DataError(f"{what}: {a.path} has {', '.join(a.sets)}; {b.path} has {', '.join(b.sets)}.")
    return [_compare_set(name, a, b, intersect, force) for name in both if not sets or name in sets]


def _renamed(a: EvalResult, b: EvalResult) -> tuple[EvalResult, list[str]]:
    """``b`` with its set under the name of that of ``a``, where each has one file of prompts: names follow files."""
    described = [(result.record.get("evaluation") or {}).get("sets", {}) for result in (a, b)]
    of_prompts = (s.get("env") == PROMPT_ENV for sets in described for s in sets.values())
    if not (len(a.sets) == len(b.sets) == 1 and all(len(s) == 1 for s in described) and all(of_prompts)):
        return b, []
    ((name, _),), (trajectories,), (of_set,) = a.sets.items(), b.sets.values(), described[1].values()
    record = {**b.record, "evaluation": {**b.record["evaluation"], "sets": {name: of_set}}}
    return replace(b, sets={name: trajectories}, record=record), [name]


def _compare_set(name: str, a: EvalResult, b: EvalResult, intersect: bool, force: bool) -> SetComparison:
    notes = _check_content(name, a, b, force)
    tasks_a, tasks_b = _tasks(a.sets[name]), _tasks(b.sets[name])
    left_out = _unmatched(name, a, b, tasks_a, tasks_b, intersect)
    common = [task for task in tasks_a if task in tasks_b]
    prompts_a, prompts_b = (_prompts(result.sets[name]) for result in (a, b))
    for what, changed in (
        ("another seed or options", [t for t in common if task_key(tasks_a[t]) != task_key(tasks_b[t])]),
        ("another prompt", [t for t in common if t in prompts_a and prompts_b.get(t, prompts_a[t]) != prompts_a[t]]),
    ):
        if changed:
            text = f"{name}: {len(changed)} tasks have the same id but {what} ({first_few(changed)})"
            if not force:
                raise DataError(f"{text}: their content has changed. --force compares them all the same.")
            notes.append(text)
    episodes = [by_episode(result.sets[name]) for result in (a, b)]
    scored = [[e for e in of_run if not is_error(e)] for of_run in episodes]
    solving = [by_task(of_run, lambda e: float(solved(e))) for of_run in scored]
    earning = [by_task(of_run, reward_of) for of_run in scored]
    paired = [task for task in common if all(task in of_run for of_run in solving)]
    if unscored := [task for task in common if task not in set(paired)]:
        left_out["not scored in one of the runs (infrastructure errors)"] = unscored
    if not paired:
        raise DataError(f"{name}: no task was scored in both runs, so there is nothing to compare.")
    success, reward = ([[fmean(run[task]) for task in paired] for run in runs] for runs in (solving, earning))
    single = all(len(of_run[task]) == 1 for of_run in solving for task in paired)
    flips = [Flip(task, x, y) for task, x, y in zip(paired, *success, strict=True) if x != y]
    flips.sort(key=lambda flip: -abs(flip.b - flip.a))
    counts = [sum(len(of_run[task]) for task in paired) for of_run in solving]
    return SetComparison(
        name=name,
        n_tasks=len(paired),
        episodes=(counts[0], counts[1]),
        errors=(len(episodes[0]) - len(scored[0]), len(episodes[1]) - len(scored[1])),
        success=paired_binary(*success) if single else paired_means(*success, largest=1.0),
        reward=paired_means(*reward),
        gained=[flip for flip in flips if flip.b > flip.a],
        lost=[flip for flip in flips if flip.b < flip.a],
        left_out=left_out,
        notes=notes,
    )


def _tasks(trajectories: Sequence[Trajectory]) -> dict[str, Task]:
    return {t.task.task_id: t.task for t in trajectories}


def _prompts(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Task -> what was asked: the messages before the first turn.

    Not of tasks whose every episode failed in its reset, nor of several agents: what one of these is asked may depend
    on what another did.
    """
    asked: dict[str, list[Any]] = {}
    for episode in by_episode(trajectories):
        messages = list(takewhile(lambda m: m.get("role") != "assistant", episode[0].messages))
        if messages and len(episode) == 1:
            asked.setdefault(episode[0].task.task_id, messages)
    return asked


def _unmatched(
    name: str, a: EvalResult, b: EvalResult, tasks_a: dict[str, Task], tasks_b: dict[str, Task], intersect: bool
) -> dict[str, list[str]]:
    only = {
        f"only in {result.path}": [task for task in own if task not in other]
        for result, own, other in ((a, tasks_a, tasks_b), (b, tasks_b, tasks_a))
    }
    left_out = {where: ids for where, ids in only.items() if ids}
    shared = len(set(tasks_a) & set(tasks_b))
    if left_out and (not intersect or not shared):
        listed = "; ".join(f"{len(ids)} {where} ({first_few(ids)})" for where, ids in left_out.items())
        advice = f"--intersect compares the {shared} that are in both." if shared else "They share none."
        raise DataError(f"{name}: the runs are of different tasks: {listed}. {advice}")
    return left_out


def _check_content(name: str, a: EvalResult, b: EvalResult, force: bool) -> list[str]:
    """What the run records say about the set: refuse where its content changed, note what could not be checked."""
    identities = [result.record.get("evaluation") or {} for result in (a, b)]
    of_set = [identity.get("sets", {}).get(name) for identity in identities]
    if a.path == b.path:
        return []  # two steps of one training run, whose configuration is one
    if None in of_set:
        return ["one of the runs holds no record of the environment's code, so whether it changed is not known"]
    of_set = [content(described) for described in of_set]
    changed = [key for key in _CONTENT if of_set[0].get(key) != of_set[1].get(key)]
    notes = []
    if "data_digest" in changed and all(described.get("env") == PROMPT_ENV for described in of_set):
        changed.remove("data_digest")  # rows are known by their own ids, and what was asked is compared
        notes.append(
            "the data files differ; tasks are paired by id, and a prompt that is another one is refused. Whether rows "
            "with a task_id of their own have the same answers is not known"
        )
    if changed:
        listed = "; ".join(_difference(key, of_set[0].get(key), of_set[1].get(key)) for key in changed)
        if not force:
            raise DataError(
                f"{name}: what was evaluated has changed between the runs: {listed}. A difference of scores may come "
                "from that. --force compares them all the same."
            )
        notes.append(f"compared although what was evaluated has changed: {listed}")
    sampling = [identity.get("sampling", {}) for identity in identities]
    differing = [key for key in sampling[0] if sampling[0][key] != sampling[1].get(key)]
    notes += [f"sampling: {_difference(key, sampling[0][key], sampling[1].get(key))}" for key in differing]
    return notes


def _difference(key: str, before: Any, after: Any) -> str:
    digests = {"code_digest": "the environment's code differs", "data_digest": "a data file differs"}
    return digests.get(key) or f"{key} {before!r} and {after!r}"


# -- statistics ------------------------------------------------------------------------------------------


def paired_binary(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Success of one episode a task: McNemar's exact test, and the interval of Bonett and Price.

    The interval (Bonett and Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data", equation 5) adds one task to each kind of flip, so it is right for few tasks and no flips.
    """
    n = len(a)
    gained = sum(y > x for x, y in zip(a, b, strict=True))
    lost = sum(y < x for x, y in zip(a, b, strict=True))
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z95 * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    difference = (gained - lost) / n
    stderr = math.sqrt(max(gained + lost - n * difference**2, 0.0)) / n
    return Paired(
        a=fmean(a),
        b=fmean(b),
        difference=difference,
        low=max(-1.0, up - down - half),
        high=min(1.0, up - down + half),
        stderr=stderr,
        p=mcnemar(gained, lost),
        test="McNemar, exact",
    )


def paired_means(a: Sequence[float], b: Sequence[float], *, largest: float = math.inf) -> Paired:
    """Means over the episodes of each task: Student's interval, the task being the unit, and a sign-flipping test.

    The standard error is that of the mean of the differences; NaN with a single task. ``largest``: no difference can be
    larger, so no end of the interval is.
    """
    differences = np.asarray(b, float) - np.asarray(a, float)
    n = len(differences)
    difference = float(differences.mean())
    stderr = float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    p, test = sign_flip(differences)
    half = t95(n - 1) * stderr
    low, high = max(difference - half, -largest), min(difference + half, largest)  # NaN, of one task, stays
    return Paired(fmean(a), fmean(b), difference, low, high, stderr, p, test)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p of McNemar's exact test: flips as a fair coin would give them (McNemar 1947, binomial form)."""
    n, least = gained + lost, min(gained, lost)
    term = total = 1  # C(n, k), and its sum up to the smaller count
    for k in range(1, least + 1):
        term = term * (n - k + 1) // k
        total += term
    return min(1.0, 2 * total / 2**n)


def sign_flip(differences: np.ndarray, *, flips: int = FLIPS, seed: int = SEED) -> tuple[float, str]:
    """Two-sided p of the paired permutation test, and its name.

    Under the hypothesis that the runs are alike each difference could as well have the other sign (Fisher 1935).
    All patterns are tried where there are few, else random ones, of which the observed one counts as one.
    """
    values = np.abs(differences[differences != 0])
    if not len(values):
        return 1.0, "sign flips, exact"
    # Sums in another order differ in the last bits: equal ones must count as equal.
    observed = abs(float(differences.sum())) * (1 - 1e-9)
    if len(values) <= EXACT_UP_TO:
        patterns = np.arange(2 ** len(values), dtype=np.int64)[:, None] >> np.arange(len(values)) & 1
        sums = np.abs((2.0 * patterns - 1) @ values)
        return float((sums >= observed).mean()), "sign flips, exact"
    rng, reached, left = np.random.default_rng(seed), 0, flips
    while left:
        rows = min(left, max(1, _CHUNK // len(values)))
        signs = 2.0 * rng.integers(0, 2, (rows, len(values)), dtype=np.int8) - 1
        reached += int((np.abs(signs @ values) >= observed).sum())
        left -= rows
    return (reached + 1) / (flips + 1), f"sign flips, {flips:,} random"


def in_words(paired: Paired, what: str, written: Callable[..., str]) -> str:
    """The result in one sentence. ``written`` puts one difference, or the two ends of an interval, into words."""
    if math.isnan(paired.low):
        return f"{what}: B - A is {written(paired.difference)} on a single task, which says nothing about others."
    if paired.stderr == 0 and paired.difference == 0:
        return f"{what}: the same in every task."
    verdict = (
        "significant: chance alone would rarely give so large a difference"
        if paired.significant
        else "not significant: chance alone may give so large a difference"
    )
    return (
        f"{what}: B - A is {written(paired.difference)}, 95 % interval {written(paired.low, paired.high)}. "
        f"This is {verdict} (p = {paired.p:.2g}, {paired.test})."
    )
