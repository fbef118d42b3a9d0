"""Reading back what an evaluation wrote: ``load`` gives its episodes, summaries and record.

A folder is one of ``agentrl eval`` (``trajectories.jsonl``, ``summary.json``) or of ``agentrl train`` (Parquet parts
by step, ``evaluations.jsonl``); both are read into the same :class:`EvalResult`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.data.files import read_jsonl
from agentrl.data.records import SCHEMA_VERSION, from_record
from agentrl.data.store import TrajectoryStore
from agentrl.errors import DataError
from agentrl.jsonl import read_json
from agentrl.tasks.source import env_label
from agentrl.types import Trajectory

TRAJECTORIES = "trajectories.jsonl"
SUMMARY = "summary.json"
RECORD = "run.json"
CONFIG = "config.json"
SUMMARY_VERSION = 1
"""Schema version of ``summary.json``; readers refuse a newer one."""


@dataclass(frozen=True)
class EvalResult:
    """One evaluation.

    Attributes:
        sets: held-out set -> its trajectories, in the order they were written.
        summaries: set -> the numbers of ``summary.json``; empty when the run did not come to its end.
        record: ``run.json``, empty when it is not there.
        config: ``config.json``, likewise.
        step: rollouts trained, for an evaluation in a training run.
    """

    path: Path
    sets: dict[str, list[Trajectory]]
    summaries: dict[str, dict[str, Any]]
    record: dict[str, Any]
    config: dict[str, Any]
    step: int | None = None


def load(path: str | Path, *, step: int | None = None, train: bool = False, segments: bool = True) -> EvalResult:
    """Read the evaluation in a run folder.

    Args:
        path: folder of ``agentrl eval`` or ``agentrl train``, or its ``trajectories.jsonl`` or ``summary.json``.
        step: of a training run, the evaluation after so many rollouts; None: the newest of each set.
        train: of a training run, also the training episodes, as the set ``train``.
        segments: False leaves tokens out, for readers of the text only.

    Raises:
        DataError: no such folder, no episodes in it, a damaged line, or a newer schema.
    """
    folder = Path(path).expanduser()
    if folder.is_file() and folder.name in (TRAJECTORIES, SUMMARY):
        folder = folder.parent
    if not folder.is_dir():
        raise DataError(f"{path}: no such run folder. Give a folder that `agentrl eval` or `agentrl train` wrote.")
    if (folder / TRAJECTORIES).is_file():
        if step is not None:
            raise DataError(f"{path} is a run of `agentrl eval`, which has no steps; leave the step out.")
        sets = read_episodes(folder / TRAJECTORIES, segments=segments)
        return EvalResult(folder, sets, read_summaries(folder / SUMMARY), *_description(folder))
    if (folder / "trajectories").is_dir():
        return _training_run(folder, step, train, segments)
    raise DataError(f"{path}: neither {TRAJECTORIES} nor trajectories/ is in it, so it is no run folder with episodes.")


def read_episodes(file: Path, *, segments: bool = True) -> dict[str, list[Trajectory]]:
    """Set -> trajectories of a ``trajectories.jsonl``; an unfinished last line is passed over.
    Raises DataError: a line is no trajectory, or of a newer schema; the text names file and line."""
    sets: dict[str, list[Trajectory]] = {}
    for number, record in enumerate(read_jsonl(file), start=1):
        version = record.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise DataError(
                f"{file}:{number}: schema version {version!r}, this agentrl reads up to {SCHEMA_VERSION}: update it."
            )
        try:
            trajectory = from_record(record, segments=segments)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{file}:{number}: not the record of a trajectory: {error!r}") from None
        sets.setdefault(record.get("set") or env_label(trajectory.task.env), []).append(trajectory)
    return sets


def read_summaries(file: Path) -> dict[str, dict[str, Any]]:
    """Set -> numbers of a ``summary.json``; empty when there is none. Raises DataError when it is damaged or newer."""
    if not file.is_file():
        return {}
    values = read_json(file)
    version = values.get("schema_version")
    if not isinstance(version, int) or version > SUMMARY_VERSION or not isinstance(values.get("sets"), dict):
        raise DataError(
            f"{file}: expected schema version {SUMMARY_VERSION} with `sets`, got version {version!r}: "
            "it was written by another agentrl, or is no summary of an evaluation."
        )
    return values["sets"]


def _description(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``run.json`` and ``config.json``; empty where they are not there."""
    record, config = (read_json(file) if (file := folder / name).is_file() else {} for name in (RECORD, CONFIG))
    return record, config


def _training_run(folder: Path, step: int | None, train: bool, segments: bool) -> EvalResult:
    store = TrajectoryStore(folder / "trajectories", read_only=True)
    parts = [part for part in store.parts() if part.name.startswith("eval-") or (train and part.name == "train")]
    newest: dict[str, int] = {}
    for part in parts:
        if step in (None, part.step):
            newest[part.name] = max(part.step, newest.get(part.name, -1))
    if not newest:
        steps = sorted({part.step for part in parts})
        raise DataError(
            f"{folder}: no evaluation after step {step}; there are some after {', '.join(map(str, steps))}."
            if steps
            else f"{folder}: this training run holds no evaluation; give --eval-interval when training."
        )
    sets = {
        name.removeprefix("eval-"): list(store.read(name, step=at, segments=segments)) for name, at in newest.items()
    }
    summaries: dict[str, dict[str, Any]] = {}
    lines = folder / "evaluations.jsonl"
    for line in read_jsonl(lines) if lines.is_file() else ():
        for name, summary in line["sets"].items():
            if newest.get(f"eval-{name}") == line["step"]:
                summaries[name] = summary
    held_out = [at for name, at in newest.items() if name != "train"]
    return EvalResult(folder, sets, summaries, *_description(folder), step=max(held_out or newest.values()))
