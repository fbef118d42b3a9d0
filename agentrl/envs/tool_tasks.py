"""Which task an episode of a ``ToolEnv`` is about, and its row."""

from __future__ import annotations

import inspect
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.concurrency.event_loop import attend
from agentrl.concurrency.threads import own_thread
from agentrl.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from agentrl.envs.tool_env import ToolEnv


def task_index(env: ToolEnv, split: str, options: dict[str, Any] | None) -> int:
    """The number of the task that ``options`` ask for, or one drawn from ``env.np_random``.

    Raises:
        ConfigError: There is no task of that number, or none at all.
    """
    count = env.num_tasks(split)
    if count == 0:
        others = [name for name in env.splits if env.num_tasks(name) != 0]
        has = f"It has some in {', '.join(map(repr, others))}. " if others else ""
        raise ConfigError(
            f"{type(env).__name__} has no tasks in split {split!r}. {has}Name another split, or give it some: `tasks`, "
            "or an argument of the environment that `agentrl env show` lists."
        )
    index = (options or {}).get("index")
    if index is None:
        return int(env.np_random.integers(2**31 if count is None else count))
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise ConfigError(
            f"{type(env).__name__}.reset: options['index'] is {index!r:.60} ({type(index).__name__}); "
            "the number of a task is expected, such as 3."
        )
    if index < 0 or (count is not None and index >= count):
        limit = "" if count is None else f"; split {split!r} has {count}"
        raise ConfigError(f"{type(env).__name__} has no task {index}{limit}.")
    return int(index)


async def task_row(env: ToolEnv, split: str, index: int | str, given: Any) -> dict[str, Any]:
    """The row of a task, as a dict with ``prompt``.

    Args:
        env: The environment.
        split: One of its splits.
        index: Of :func:`task_index`.
        given: The task itself, where ``options["row"]`` brought it.

    Raises:
        EnvError: What the author's ``task`` or ``tasks`` gave is not a task.
    """
    if given is not None:
        made = given
    elif env.tasks is not None:
        made = env.tasks[split][index]
    else:
        rng = np.random.default_rng([zlib.crc32(split.encode()), index])
        if inspect.iscoroutinefunction(env.task):
            made = await attend(f"{type(env).__name__}.task", env.task, rng, split, owner=env)
        else:
            made = await own_thread(env).run(env.task, rng, split)
    if isinstance(made, str):
        made = {"prompt": made}
    elif isinstance(made, tuple) and len(made) == 2:
        made = {"prompt": made[0], "answer": made[1]}
    if not isinstance(made, dict) or not isinstance(made.get("prompt"), (str, list)):
        listed = given is None and env.tasks is not None
        name = type(env).__name__
        where = f"{name}.tasks[{split!r}][{index}]" if listed else f"what {name}.task returned"
        raise EnvError(f"{where} must be a prompt, (prompt, answer) or a dict with 'prompt', got {made!r:.120}.")
    return dict(made)
