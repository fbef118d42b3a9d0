"""Held-out sets: what is evaluated, by which code, in training and in ``agentrl eval`` alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.data.tasks import env_label, held_out_tasks
from agentrl.errors import ConfigError
from agentrl.evaluation.metrics import EvalSummary, summarize
from agentrl.rollout.setup import make_env
from agentrl.types import Task, Trajectory


@dataclass(frozen=True)
class HeldOutSet:
    """A named list of tasks and the environment they belong to."""

    name: str
    split: str
    spec: str
    kwargs: dict[str, Any]
    tasks: list[Task]


def held_out_sets(cfg: Any, *, split: str = "test") -> list[HeldOutSet]:
    """The environment's own held-out split, then each ``--eval-prompt-data``.

    Args:
        cfg: ``Config`` or ``EvalConfig``.
        split: split of the environment; the files of ``--eval-prompt-data`` are held out whole.

    Raises:
        ConfigError: there is nothing to evaluate on.
    """
    wanted: list[tuple[str, str, tuple[str, dict[str, Any]]]] = []
    if cfg.env or cfg.prompt_data:
        spec, kwargs = cfg.env_spec()
        wanted.append((env_label(cfg.env or cfg.prompt_data), split, (spec, kwargs)))
    for name, path in cfg.eval_prompt_data:
        spec, kwargs = cfg.prompt_env_spec(path)
        wanted.append((name, "all", (spec, kwargs)))
    sets = []
    for name, its_split, (spec, kwargs) in wanted:
        env = make_env(spec, kwargs)
        try:
            if cfg.eval_prompt_data and its_split == split and not _has_tasks(env, split):
                continue  # no held-out tasks of its own: the files are what it is evaluated on
            if cfg.prompt_data and not _has_tasks(env, its_split):
                raise ConfigError(
                    f"{cfg.prompt_data} has no held-out tasks: give --eval-prompt-data NAME PATH, or keep a share of "
                    "the file back with --env-arg test_fraction=0.1"
                )
            tasks = held_out_tasks(spec, env, split=its_split, limit=cfg.eval_tasks)
        finally:
            env.close()
        sets.append(HeldOutSet(name, its_split, spec, kwargs, tasks))
    if not sets:
        raise ConfigError("nothing to evaluate on: give --env NAME, or --eval-prompt-data NAME PATH")
    names = [s.name for s in sets]
    if len(set(names)) != len(names):
        raise ConfigError(f"held-out sets need distinct names, got {', '.join(names)}")
    return sets


def _has_tasks(env: Any, split: str) -> bool:
    return split in env.unwrapped.splits and env.unwrapped.num_tasks(split) != 0


async def run_set(
    runner: Any,
    held_out: HeldOutSet,
    *,
    samples: int,
    tag: str,
    on_episode: Callable[[Trajectory], None] | None = None,
) -> tuple[EvalSummary, list[Trajectory]]:
    """Play every task of a set ``samples`` times.

    Args:
        runner: an :class:`~agentrl.rollout.worker.EpisodeRunner` over the set's environment.
        held_out: the set.
        samples: episodes a task.
        tag: prefix of the group ids, unique in the run.
        on_episode: called with each trajectory as it ends.
    """
    started = time.monotonic()
    groups = await asyncio.gather(
        *(
            runner.run_group(task, samples, f"{tag}-{index:06d}", on_trajectory=on_episode)
            for index, task in enumerate(held_out.tasks)
        )
    )
    trajectories = [t for group in groups for t in group.trajectories]
    return summarize(held_out.name, held_out.split, trajectories, time.monotonic() - started), trajectories
