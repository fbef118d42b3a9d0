"""Tasks that fail for their own sake: how often each died, over all starts of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.data.episodes import by_episode
from agentrl.data.files import write_json
from agentrl.errors import DataError
from agentrl.jsonl import read_json
from agentrl.types import Group, Outcome, StopReason, Trajectory

TASK_DEATHS = 3
"""Rollouts in which a task may die, while others live, before it is dropped."""


def failures(groups: Iterable[Group]) -> tuple[list[Trajectory], int]:
    """Of each failed episode (for reasons that are not the model's) a trajectory, and how many episodes there are."""
    episodes = by_episode(t for group in groups for t in group.trajectories)
    return [e[0] for e in episodes if e[0].outcome is Outcome.INFRA_ERROR], len(episodes)


def lived(group: Group) -> bool:
    """Whether at most half of a task's episodes failed, and two are left to be compared."""
    failed, total = failures([group])
    return not failed or (2 * len(failed) <= total and total - len(failed) >= 2)


def never_fits(group: Group) -> bool:
    """Whether the task can never be played: its first prompt is too long."""
    return all(t.outcome is Outcome.INFRA_ERROR and not t.info.get("retryable", True) for t in group.trajectories)


def engines_failed(group: Group) -> bool:
    """Whether all that failed was the engines' doing, so that it says nothing of the task."""
    return all(t.stop_reason is StopReason.ENGINE_ERROR for t in failures([group])[0])


class FailedTasks:
    """``failed_tasks.json`` of a run: task -> deaths and the last error. It is read now; one that is damaged counts as
    empty.

    It is outside of the checkpoints: a run that ended because of such tasks must not meet them again in the same
    way."""

    def __init__(self, file: Path):
        self._file = file
        self._tasks: dict[str, dict[str, Any]] = {}
        try:
            for task_id, noted in read_json(file).items():
                self._tasks[task_id] = {"deaths": int(noted["deaths"]), "error": str(noted["error"])}
        except (DataError, KeyError, TypeError, ValueError):
            pass

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def forget(self, groups: Iterable[Group]) -> None:
        """These live."""
        gone = [self._tasks.pop(group.task.task_id, None) for group in groups]
        if any(gone):
            self.save()

    def died(self, group: Group) -> int:
        """Note a task's death while others lived; returns how many there are now."""
        noted = self._note(group)
        noted["deaths"] += 1
        return int(noted["deaths"])

    def suspect(self, groups: Iterable[Group]) -> None:
        """Note tasks of a rollout in which nothing lived: no death, since it may be the environment."""
        for group in groups:
            self._note(group)
        self.save()

    def save(self) -> None:
        """Write the file. Raises StorageError."""
        write_json(self._file, self._tasks)

    def _note(self, group: Group) -> dict[str, Any]:
        noted = self._tasks.setdefault(group.task.task_id, {"deaths": 0, "error": ""})
        noted["error"] = str(failures([group])[0][-1].error)
        return noted
