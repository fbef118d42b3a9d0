"""A fixed list of tasks, given in Python or as a file of JSON Lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError

TASK_KEYS = frozenset({"task_id", "seed", "split", "index", "options"})
"""What a task that has no ``prompt`` may hold."""

DEFAULT_SPLIT = "test"


def read_task_list(
    tasks: Mapping[str, Sequence[Any]] | Sequence[Any] | str | os.PathLike[str],
) -> dict[str, list[dict[str, Any]]]:
    """Tasks by split, checked.

    Args:
        tasks: Tasks by split; or a list, or the path of a JSON Lines file, of tasks that name their ``split``.

    Raises:
        ConfigError: There are none, or one is not of the form that it must have.
        DataError: The same of a file; the text names the line.
    """
    if isinstance(tasks, (str, os.PathLike)):
        return _by_split([(where, _checked(task, where, DataError)) for where, task in _lines(Path(tasks))])
    if isinstance(tasks, Mapping):
        found = {
            split: [_checked(task, f"task {i} of split {split!r}", ConfigError) for i, task in enumerate(listed)]
            for split, listed in tasks.items()
        }
        if not any(found.values()):
            raise ConfigError(f"there are no tasks in {', '.join(map(repr, found)) or 'an empty dict'}.")
        return found
    return _by_split([(f"task {i}", _checked(task, f"task {i}", ConfigError)) for i, task in enumerate(tasks)])


def _by_split(tasks: list[tuple[str, dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    if not tasks:
        raise ConfigError("the list of tasks is empty.")
    found: dict[str, list[dict[str, Any]]] = {}
    for _, task in tasks:
        found.setdefault(task.get("split", DEFAULT_SPLIT), []).append(task)
    return found


def _lines(path: Path) -> list[tuple[str, Any]]:
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the list of tasks {str(path)!r} cannot be read: {error}.") from error
    tasks = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            tasks.append((where, json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}.") from error
    return tasks


def _checked(task: Any, where: str, error: type[ConfigError] | type[DataError]) -> dict[str, Any]:
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
