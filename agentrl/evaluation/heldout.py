"""Held-out sets: what is evaluated, by which code, in training and in ``agentrl eval`` alike."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.schema import Config, EvalConfig
from agentrl.envs.builtin.prompt import PromptEnv
from agentrl.envs.registry import make_env
from agentrl.envs.tool_env import check_machine
from agentrl.errors import ConfigError
from agentrl.rollout.rehearsal import rehearse
from agentrl.tasks.source import drawn_held_out_task, env_label, held_out_tasks
from agentrl.types import Task

TRAINING_SPLIT = "train"


@dataclass(frozen=True)
class HeldOutSet:
    """A named list of tasks and the environment they belong to, which is asked for them. An ``optional`` one that has
    none is left out."""

    name: str
    split: str
    spec: str
    kwargs: dict[str, Any]
    tasks: Sequence[Task] = ()
    available: int | None = None
    """Tasks of the split; None when it has no end."""
    optional: bool = False


def held_out_sets(cfg: Config | EvalConfig, *, split: str = "test") -> list[HeldOutSet]:
    """That split of each environment, then each ``--eval-prompt-data``, whose files are held out whole.
    Raises ConfigError: there is nothing to evaluate on, a named task is not there, or two sets have one name."""
    wanted = [*_environments(cfg, split), *_files(cfg)]
    names = [w.name for w in wanted]
    if len(set(names)) != len(names):
        raise ConfigError(f"held-out sets need distinct names, got {', '.join(names)}")
    named = dict.fromkeys(getattr(cfg, "task_id", ()), False)
    """Whether a task of this name was found."""
    known: list[str] = []
    sets = []
    for one in wanted:
        env = make_env(one.spec, one.kwargs, sandbox=cfg.sandbox)
        try:
            check_machine(env)
            splits, count = env.get_wrapper_attr("splits"), env.get_wrapper_attr("num_tasks")
            if one.split == "all" and "all" not in splits:
                one = replace(one, split="test")  # data with splits of its own: what it holds out itself
            nothing = one.split not in splits or count(one.split) == 0
            if one.optional and nothing:
                continue  # no held-out tasks of its own: the other sets are what it is evaluated on
            if cfg.prompt_data and one.split == split and nothing:
                raise ConfigError(
                    f"{cfg.prompt_data} has no held-out tasks: give --eval-prompt-data NAME PATH, or keep a share of "
                    "the file back with --env-arg test_fraction=0.1"
                )
            if named:
                tasks = _named_tasks(one, env, named, known, endless=not nothing and count(one.split) is None)
            else:
                tasks = held_out_tasks(one.spec, env, split=one.split, limit=cfg.eval_tasks)
            available = count(one.split) if tasks else 0
        finally:
            env.close()
        if tasks:
            sets.append(replace(one, tasks=tasks, available=available))
    for name in (name for name, found in named.items() if not found):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
        raise ConfigError(f"--task-id {name}: there is no such task. Near it: {', '.join(near)}.")
    if not sets:
        raise ConfigError("nothing to evaluate on: give --env NAME, or --eval-prompt-data NAME PATH")
    return sets


def _named_tasks(one: HeldOutSet, env: Any, named: dict[str, bool], known: list[str], *, endless: bool) -> list[Task]:
    """The tasks of a set that ``--task-id`` names, by id or by number, in that order. Ids there are go to ``known``."""
    if endless:
        of_name = {name: _drawn(name, one) for name in named}
        known += [drawn_held_out_task(one.spec, one.split, number).task_id for number in range(3)]
    else:
        available = held_out_tasks(one.spec, env, split=one.split)
        by_id = {task.task_id: task for task in available}
        numbered = {n: available[int(n)] for n in named if n.isdecimal() and int(n) < len(available)}
        of_name = {name: by_id.get(name) or numbered.get(name) for name in named}
        known += by_id
    tasks = {task.task_id: task for name, task in of_name.items() if task is not None}
    named |= {name: True for name, task in of_name.items() if task is not None}
    return list(tasks.values())


def held_out_environments(cfg: Config | EvalConfig) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the environments of the held-out sets. None is made, no data is read."""
    return [(wanted.spec, wanted.kwargs) for wanted in (*_environments(cfg, "test"), *_files(cfg))]


def rehearse_set(cfg: Config | EvalConfig, held_out: HeldOutSet) -> None:
    """Play one episode of a set without a model, see :func:`~agentrl.rollout.rehearsal.rehearse`."""
    rehearse(
        lambda: make_env(held_out.spec, held_out.kwargs, tool_timeout=cfg.tool_timeout, sandbox=cfg.sandbox),
        held_out.tasks[:2],
        cfg.custom_generate_function_path,
        held_out.name,
    )


def _environments(cfg: Config | EvalConfig, split: str) -> list[HeldOutSet]:
    """Sets over the held-out split of an environment each: of that of ``--env``, or those; then of each ``--eval-env``.

    In training the first is the one that is trained on.
    """
    several = isinstance(cfg, EvalConfig) and len(cfg.env) > 1
    others = [*(cfg.env if several else ()), *cfg.eval_env]
    wanted = []
    if not several and cfg.eval_own_split and (cfg.env or cfg.prompt_data):
        spec, kwargs = cfg.env_spec()
        label = env_label(spec if cfg.env or not cfg.prompt_data else cfg.prompt_data)
        wanted.append(HeldOutSet(label, split, spec, kwargs, optional=bool(cfg.eval_prompt_data or others)))
    names = [env_label(spec) for spec in others]
    named = [*names, *(name for name, _ in cfg.eval_prompt_data)]
    for key in cfg.env_args:
        if "." in key and not any(key.startswith(f"{name}.") for name in named):
            there = f"there are {', '.join(named)}" if named else "with one environment, no name stands there"
            raise ConfigError(f"--env-arg {key}: of the name before the dot there is no set; {there}")
    wanted += [HeldOutSet(n, split, spec, cfg.arguments_of(n)) for n, spec in zip(names, others, strict=True)]
    return wanted


def _files(cfg: Config | EvalConfig) -> list[HeldOutSet]:
    """The sets of ``--eval-prompt-data``: judged like ``--prompt-data``, where that is given, unless told otherwise."""
    own = cfg.arguments_of(None) if cfg.prompt_data else {}
    shared = {key: value for key, value in own.items() if key in PromptEnv.settings}
    wanted = []
    for name, path in cfg.eval_prompt_data:
        spec, kwargs = cfg.prompt_env_spec(path)
        wanted.append(HeldOutSet(name, "all", spec, {**kwargs, **shared, **cfg.arguments_of(name)}))
    return wanted


def _drawn(name: str, one: HeldOutSet) -> Task | None:
    """The task ``name`` of a split without end: a number, or an id, which ends with the seed that the task is."""
    if name.isdecimal():
        return drawn_held_out_task(one.spec, one.split, int(name))
    like = drawn_held_out_task(one.spec, one.split, 0)
    start = like.task_id.removesuffix(str(like.seed))
    seed = name.removeprefix(start)
    if not name.startswith(start) or not seed.isdecimal():
        return None
    return replace(like, task_id=name, seed=int(seed))
