"""A fixed list of tasks, given in Python or as a file of JSON Lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError
from agentrl.jsonl import json_lines

TASK_KEYS = frozenset({"task_id", "seed", "split", "index", "options"})
"""What a task that has no ``prompt`` may hold."""
DEFAULT_SPLIT = "test"


def read_task_list(
    tasks: Mapping[str, Sequence[Any]] | Sequence[Any] | str | os.PathLike[str],
) -> dict[str, list[dict[str, Any]]]:
    """Tasks by split, checked. Given by split; or as a list, or the path of a JSON Lines file, of tasks that name their
    ``split``.
    Raises ConfigError: there are none, or one is not of the form that it must have; DataError of a file, which names
    the line."""
    error: type[ConfigError] | type[DataError] = ConfigError
    given: Iterable[tuple[object, str | None, Any]]
    if isinstance(tasks, (str, os.PathLike)):
        error = DataError
        given = ((place, None, task) for place, _, task in json_lines(str(Path(tasks).expanduser())))
    elif isinstance(tasks, Mapping):
        given = ((f"task {i} of split {name!r}", name, t) for name, some in tasks.items() for i, t in enumerate(some))
    else:
        given = ((f"task {i}", None, task) for i, task in enumerate(tasks))
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in tasks} if isinstance(tasks, Mapping) else {}
    for where, split, task in given:
        task = _checked(task, where, error)
        found.setdefault(split or task.get("split", DEFAULT_SPLIT), []).append(task)
    if not any(found.values()):
        raise ConfigError(f"there are no tasks in {', '.join(map(repr, found)) or 'the list'}.")
    return found


def _checked(task: Any, where: object, error: type[ConfigError] | type[DataError]) -> dict[str, Any]:
    if not isinstance(task, Mapping):
        raise error(f"{where}: a task is a dict, got {task!r:.80} ({type(task).__name__}).")
    unknown = sorted(set(task) - TASK_KEYS)
    if unknown and "prompt" not in task:
        known = ", ".join(sorted(TASK_KEYS))
        raise error(f"{where}: {unknown[0]!r} means nothing here. A task has a 'prompt', or some of {known}.")
    if not isinstance(task.get("split", ""), str) or not isinstance(task.get("options", {}), Mapping):
        raise error(f"{where}: 'split' must be text and 'options' a dict, got {dict(task)!r:.120}.")
    for name in ("seed", "index"):
        if "prompt" not in task and name in task and (isinstance(task[name], bool) or not isinstance(task[name], int)):
            raise error(f"{where}: {name!r} must be a whole number, got {task[name]!r:.60}.")
    return dict(task)
