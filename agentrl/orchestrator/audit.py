"""Whether a run's folder tells of a training in which nothing was lost, done twice or left over.

The account in the newest checkpoint, the stored episodes and the logged metrics were written by different processes at
different times; here they must agree.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.schema import Config
from agentrl.config.serialize import read_run_config
from agentrl.data.checkpoint import ROLLOUT_STATE, CheckpointStore, read_json
from agentrl.data.episodes import group_of
from agentrl.data.files import read_jsonl
from agentrl.data.store import TrajectoryStore
from agentrl.errors import AgentRLError, first_few

UNFINISHED = (".tmp", ".partial", ".removed")
"""How names end of files and folders that a write or a removal leaves when it is interrupted."""


def audit(run: Path, *, least_success: float | None = None) -> list[str]:
    """What is wrong with a run that ended, a sentence each; nothing where all is well. Its folder was forked from no
    other, and its last evaluation must reach ``least_success``."""
    problems: list[str] = []
    damaged: list[str] = []
    metrics = list(read_jsonl(run / "metrics.jsonl", damaged=damaged)) if (run / "metrics.jsonl").is_file() else []
    problems += damaged
    try:
        newest = CheckpointStore.of_run(run).newest()
        state: dict[str, Any] = read_json(newest.path / ROLLOUT_STATE)["buffer"]
    except (AgentRLError, KeyError) as error:
        return [*problems, f"the account cannot be read: {error}"]
    steps = range(newest.step)
    problems += _metrics(metrics, steps)
    cfg = Config.from_dict(read_run_config(run))
    if not cfg.is_supervised:  # nothing is played there
        oldest = math.inf if cfg.partial_rollout else float(cfg.oldest_version)
        if cfg.max_staleness is not None:
            oldest = cfg.max_staleness
        store = TrajectoryStore(run / "trajectories", read_only=True)
        in_turns = not (cfg.async_buffer_size or cfg.partial_rollout)
        problems += _episodes(store, steps, state, oldest, in_turns=in_turns)
    problems += [
        f"left over: {path.relative_to(run)}" for path in sorted(run.rglob("*")) if path.name.endswith(UNFINISHED)
    ]
    if least_success is not None:
        problems += _success(run, newest.step, least_success)
    return problems


def _metrics(metrics: Iterable[Mapping[str, Any]], steps: range) -> list[str]:
    """Each step has its line, once, in order."""
    logged = [int(line["step"]) for line in metrics if "time/step" in line]
    expected = [step + 1 for step in steps]
    if logged == expected:
        return []
    twice = sorted(step for step, times in Counter(logged).items() if times > 1)
    missing = sorted({*expected} - {*logged})
    strange = sorted({*logged} - {*expected})
    said = [
        f"{len(steps_of)} {what} (step {first_few(map(str, steps_of))})"
        for what, steps_of in (("missing", missing), ("twice", twice), ("beyond the checkpoint", strange))
        if steps_of
    ]
    return [f"metrics.jsonl: {', '.join(said) or 'steps out of order'}"]


def _episodes(
    store: TrajectoryStore, steps: range, state: Mapping[str, Any], oldest: float, *, in_turns: bool
) -> list[str]:
    """Every task that was handed out is trained once, open or dropped; versions of weights are at most ``oldest``
    behind, and never go back: in an episode, and over the rollouts where these are played ``in_turns``."""
    problems = []
    trained_in: dict[str, set[int]] = defaultdict(set)
    groups_of: dict[str, set[str]] = defaultdict(set)
    episodes: Counter[str] = Counter()
    newest = -1
    stored = [part.step for part in store.parts("train")]
    if missing := sorted({*steps} - {*stored}):
        problems.append(f"episodes of rollout {first_few(map(str, missing))} are not stored")
    for step in stored:
        latest = -1
        try:
            for t in store.read("train", step=step):
                if t.advantage is None:
                    continue
                trained_in[group_of(t)].add(step)
                groups_of[t.task.task_id].add(group_of(t))
                episodes[t.trajectory_id] += 1
                for segment in t.segments:
                    versions = segment.versions[segment.loss_mask == 1]
                    if not len(versions):
                        continue
                    if (versions[1:] < versions[:-1]).any():
                        problems.append(f"{t.trajectory_id}: the versions of its tokens go back")
                    if versions.min() < step - oldest or versions.max() > step:
                        found = f"versions {versions.min()} to {versions.max()}"
                        problems.append(f"{t.trajectory_id} of rollout {step} was sampled by {found}")
                    latest = max(latest, int(versions.max()))
        except AgentRLError as error:
            problems.append(str(error))
        if in_turns and -1 < latest < newest:
            problems.append(f"rollout {step} was sampled by older weights than one before it")
        newest = max(newest, latest)
    problems += _once("group", "rollouts", trained_in)
    problems += _once("task", "groups", groups_of)
    if doubled := [name for name, times in episodes.items() if times > 1]:
        problems.append(f"{len(doubled)} episodes are stored twice ({first_few(doubled)})")
    return problems + _account(state, set(trained_in))


def _once(what: str, where: str, places: Mapping[str, set[Any]]) -> list[str]:
    several = [f"{name} in {sorted(at)}" for name, at in places.items() if len(at) > 1]
    return [f"{len(several)} {what}s were trained in several {where}: {first_few(several)}"] if several else []


def _account(state: Mapping[str, Any], trained: set[str]) -> list[str]:
    """Group ids count what was handed out: each must be one of the trained, the open or the dropped."""
    problems = []
    issued, open_groups = int(state["issued"]), {each["group_id"] for each in state["open"]}
    handed_out = {f"g{number:08d}" for number in range(issued)}
    if unknown := trained - handed_out:
        problems.append(f"trained on {len(unknown)} groups that were never handed out: {first_few(sorted(unknown))}")
    if both := trained & open_groups:
        problems.append(f"{len(both)} trained groups will be handed out again: {first_few(sorted(both))}")
    gone = handed_out - trained - open_groups
    if len(gone) != state["dropped"]:
        problems.append(
            f"{len(gone)} groups are neither trained nor open, and the account reports {state['dropped']} as dropped: "
            f"{first_few(sorted(gone))}"
        )
    if len(trained & handed_out) != state["trained"]:
        problems.append(f"the account says {state['trained']} groups were trained, the episodes say {len(trained)}")
    return problems


def _success(run: Path, step: int, least: float) -> list[str]:
    lines = list(read_jsonl(run / "evaluations.jsonl")) if (run / "evaluations.jsonl").is_file() else []
    last = [line for line in lines if line["step"] == step]
    if not last:
        return [f"there is no evaluation after the last step, {step}"]
    return [
        f"held-out success of {name} is {summary['success']['mean']:.1%} after step {step}; a run without faults "
        f"reaches {least:.0%}"
        for name, summary in last[-1]["sets"].items()
        if not summary["success"]["n"] or summary["success"]["mean"] < least
    ]


def left_behind(temporary: Path, shared_before: Iterable[Path], shared: Path = Path("/dev/shm")) -> list[str]:
    """Files that a run left in its own ``TMPDIR``, and in shared memory beside what was there before it began."""
    new = sorted({*shared.glob("*")} - {*shared_before}) if shared.is_dir() else []
    new = [path for path in new if not _is_in_use(path)]
    return [f"left over: {path}" for path in (*sorted(temporary.glob("*")), *new)]


def _is_in_use(path: Path) -> bool:
    """Whether it is of another run on this machine: weights of a driver that lives, or memory that a process has."""
    if driver := re.match(r"agentrl-weights-(\d+)-", path.name):
        return Path(f"/proc/{driver[1]}").exists()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if f"{path}\n" in maps.read_text():
                return True
    return False
