"""Checks of an environment before it is trained on: ``agentrl env check NAME``, or :func:`check_env` in a test."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import env_checker

from agentrl.envs.core import Env
from agentrl.envs.fuzz import fuzz_actions
from agentrl.envs.gym_adapter import GymEnv
from agentrl.envs.info_checks import CheckFailed, check_end, check_json, check_messages, check_start
from agentrl.envs.registry import make as make_env
from agentrl.envs.registry import with_async
from agentrl.envs.tool_env import ToolEnv, check_machine
from agentrl.envs.tool_schemas import schema_problems
from agentrl.envs.wrapper import Wrapper
from agentrl.errors import AgentRLError, ConfigError
from agentrl.rewards.number import checked_reward
from agentrl.tools.threads import run_blocking, run_coroutine

Make = Callable[[], Env | Wrapper]

SAMPLED_TASKS = 32
"""Tasks of each split whose beginning is compared with that of the others."""
MOST_TASKS = 2000
"""Tasks of each split that are compared where all of a task is known, in ``SAMPLED_SECONDS`` as many as fit."""
SAMPLED_SECONDS = 2.0
TURNS = 12
"""Turns of an episode that is played for comparison."""
CHECK_SECONDS = 120.0
"""Time of one check."""


class NothingToCheck(Exception):
    """A check does not apply; the text says why."""


@dataclass(frozen=True)
class CheckResult:
    """One check: its name, how it went (``passed``, ``failed`` or ``skipped``), and the reason."""

    name: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`check_env` found.

    Example:
        >>> import agentrl
        >>> class Yes(agentrl.Env):
        ...     def reset(self, *, seed=None, options=None):
        ...         super().reset(seed=seed)
        ...         return f"Say yes {self.np_random.integers(10**9)} times.", {}
        ...     def step(self, action):
        ...         return "", float("yes" in action), True, False, {}
        >>> check_env(Yes).ok
        True
    """

    env: str
    results: list[CheckResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> list[CheckResult]:
        """The checks that failed."""
        return [result for result in self.results if result.outcome == "failed"]

    def __str__(self) -> str:
        width = max((len(result.name) for result in self.results), default=0)
        lines = [f"{r.name:<{width}}  {r.outcome:<7}  {r.reason}".rstrip() for r in self.results]
        return "\n".join(lines)


def check_env(env: str | type[Env] | Callable[..., Any] | gymnasium.Env[Any, Any], **env_args: Any) -> Report:
    """Checks an environment against all that training and evaluation rely on.

    Args:
        env: What :func:`agentrl.make` takes, or an environment that it made.
        **env_args: Arguments of its constructor.

    Raises:
        ConfigError: There is no such environment, or it does not take these arguments.
    """
    make = _maker(env, env_args)
    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    try:
        made = make()
        try:
            check_machine(made)
        finally:
            made.close()
    except AgentRLError:
        raise
    except Exception as error:  # the author's constructor may raise anything
        return Report(name, [CheckResult("can be made", "failed", _described(error))])
    return Report(name, [_run(check, make) for check in CHECKS])


def _maker(env: Any, env_args: dict[str, Any]) -> Make:
    if not isinstance(env, gymnasium.Env):
        return lambda: make_env(env, **env_args)
    spec = env.spec
    if env_args or spec is None:
        raise ConfigError(
            "check_env makes several environments: give it a name, a class or a function, or an environment that "
            "agentrl.make made, without further arguments."
        )
    return lambda: with_async(gymnasium.make(spec), spec.id)


def _run(check: Callable[[Make], str | None], make: Make) -> CheckResult:
    name = check.__name__.removeprefix("_check_").replace("_", " ")
    try:
        # In a thread: an environment that hangs must not hang the checker.
        reason = run_coroutine(asyncio.wait_for(run_blocking(check, make), CHECK_SECONDS))
    except NothingToCheck as why:
        return CheckResult(name, "skipped", str(why))
    except CheckFailed as why:
        return CheckResult(name, "failed", str(why))
    except TimeoutError:
        return CheckResult(name, "failed", f"took longer than {CHECK_SECONDS:g} s")
    except Exception as error:  # the author's code may raise anything
        return CheckResult(name, "failed", _described(error))
    return CheckResult(name, "passed", reason or "")


# -- the checks -------------------------------------------------------------------------------------


def _check_gymnasium(make: Make) -> None:
    """Gymnasium's own checker, which warns of what it does not like. It wants what is inside of wrappers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env_checker.check_env(make().unwrapped)
    own = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    if own:
        raise CheckFailed(f"warns: {own[0].strip()}")


def _check_any_text(make: Make) -> str:
    """Nothing a model writes may raise, and every transition keeps the contract."""
    env = make()
    _, info = env.reset(seed=0)
    check_start(info)
    start = info["messages"]
    actions = _actions(env, info, np.random.default_rng(0))
    episodes = 1
    for action in actions:
        try:
            *_, terminated, truncated, info = _checked_step(env, action)
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(f"step raised on {action!r:.60}: {_described(error)}") from error
        if len(info["messages"]) > len(start) and info["messages"][: len(start)] == start:
            raise CheckFailed("info['messages'] after a step repeats the conversation; it holds the new messages only")
        if terminated or truncated:
            check_end(info)
            start = env.reset(seed=episodes)[1]["messages"]
            episodes += 1
    env.close()
    return f"{len(actions)} actions, {episodes} episodes"


def _check_both_ways_alike(make: Make) -> None:
    """``reset`` and ``step`` give what ``areset`` and ``astep`` give."""
    blocking = _episode(make(), 11)

    async def asynchronous() -> list[Any]:
        env = make()
        out = [copy.deepcopy(await env.areset(seed=11))]
        for action in _some_actions(env, out[0][1]):
            out.append(copy.deepcopy(await env.astep(action)))
            if out[-1][2] or out[-1][3]:
                break
        await env.aclose()
        return out

    _same(blocking, run_coroutine(asynchronous()), "step and astep")


def _check_seed_decides(make: Make) -> None:
    """The same seed gives the same episode, in another instance and after other episodes."""
    env = make()
    first = _episode(env, 5, close=False)
    _same(first, _episode(make(), 5), "two instances with one seed")
    _episode(env, 6, close=False)
    env.reset(seed=7)
    _same(first, _episode(env, 5), "an episode and the same one after others (what an episode changes is set in reset)")


def _check_instances_are_apart(make: Make) -> None:
    """Two environments at once do not disturb each other."""
    alone = [_episode(make(), seed) for seed in (1, 2)]
    both = [make(), make()]
    together: list[list[Any]] = [[copy.deepcopy(env.reset(seed=seed))] for env, seed in zip(both, (1, 2), strict=True)]
    plans = [_some_actions(env, out[0][1]) for out, env in zip(together, both, strict=True)]
    for turn in range(TURNS):
        for env, out, plan in zip(both, together, plans, strict=True):
            if turn < len(plan) and not (len(out) > 1 and (out[-1][2] or out[-1][3])):
                out.append(copy.deepcopy(env.step(plan[turn])))
    for env in both:
        env.close()
    _same(alone[0], together[0], "an episode alone and beside another")
    _same(alone[1], together[1], "an episode alone and beside another")


def _check_tool_schemas(make: Make) -> str:
    """Tools are described in the OpenAI form, by valid JSON schemas."""
    env = make()
    _, info = env.reset(seed=0)
    env.close()
    tools = [*(info.get("tools") or ())]
    for prompt in (info.get("prompts") or {}).values():
        tools += (prompt.get("tools") if isinstance(prompt, dict) else None) or ()
    if not tools:
        raise NothingToCheck("the environment lists no tools")
    problems = schema_problems(tools)
    if problems:
        raise CheckFailed(problems[0])
    return ", ".join(tool["function"]["name"] for tool in tools)


def _check_splits_are_disjoint(make: Make) -> str:
    """No task of one split is one of another."""
    env = make()
    if isinstance(env.unwrapped, GymEnv):
        raise NothingToCheck("tasks are seeds: even ones in train, odd ones in test")
    splits = [split for split in env.splits if split != "all"]
    begun = {split: _tasks(env, split, SAMPLED_TASKS) for split in splits}
    # A row is all of a task, so that many can be compared; games that begin alike may go on otherwise.
    whole = isinstance(env.unwrapped, ToolEnv)
    rows = {split: _tasks(env, split, MOST_TASKS, with_row=True) for split in splits} if whole else begun
    env.close()
    filled = [split for split, (_, tasks) in rows.items() if tasks]
    if len(filled) < 2:
        raise NothingToCheck(f"there is one split with tasks: {', '.join(filled) or 'none'}")
    begin_alike = all(len(tasks) <= count // 2 for count, tasks in begun.values())
    if begin_alike and not whole:
        raise NothingToCheck("tasks begin alike, so the first messages do not tell them apart")
    for sampled in (rows,) if begin_alike else (begun, rows):
        for split, other in itertools.combinations(filled, 2):
            one, another = sampled[split][1], sampled[other][1]
            if common := sorted(one.keys() & another.keys()):
                raise CheckFailed(
                    f"{len(common)} of {len(another)} sampled tasks of {other!r} are in {split!r} too, such as "
                    f"{another[common[0]]}: {json.loads(common[0])[0][-1]['content']!r:.80}"
                )
    return ", ".join(f"{len(rows[split][1])} of {split}" for split in filled)


CHECKS = (
    _check_gymnasium,
    _check_any_text,
    _check_both_ways_alike,
    _check_seed_decides,
    _check_instances_are_apart,
    _check_tool_schemas,
    _check_splits_are_disjoint,
)


# -- parts of them ----------------------------------------------------------------------------------


def _actions(env: Any, info: dict[str, Any], rng: np.random.Generator) -> list[str]:
    """Actions that make sense first, since others may end the episode."""
    return [*env.example_actions, *fuzz_actions(info.get("tools") or (), env.call_format, rng)]


def _some_actions(env: Any, info: dict[str, Any]) -> list[str]:
    return [*_actions(env, info, np.random.default_rng(1))[: TURNS - 1], "an answer"]


def _episode(env: Any, seed: int, *, close: bool = True) -> list[Any]:
    out: list[Any] = [copy.deepcopy(env.reset(seed=seed))]
    for action in _some_actions(env, out[0][1]):
        out.append(copy.deepcopy(_checked_step(env, action)))
        if out[-1][2] or out[-1][3]:
            break
    if close:
        env.close()
    return out


def _checked_step(env: Any, action: str) -> Any:
    """A step whose form, messages and ``info`` are as promised; ``Env`` itself checks types and rewards."""
    result = env.step(action)
    info = result[4]
    if result[0] not in env.observation_space:
        raise CheckFailed(f"the observation {result[0]!r:.60} is not in {env.observation_space!r}")
    check_messages(info["messages"], "info['messages']")
    for name, value in (info.get("rewards") or {}).items():
        checked_reward(value, f"info['rewards'][{name!r}]")
    check_json(info, "step")
    return result


def _tasks(env: Any, split: str, most: int, *, with_row: bool = False) -> tuple[int, dict[str, str]]:
    """How many tasks were sampled; and their first messages (and rows) as JSON, each with the id of one such task."""
    count = env.num_tasks(split)
    chosen = range(SAMPLED_TASKS) if count is None else random.Random(0).sample(range(count), min(count, most))
    found: dict[str, str] = {}
    sampled, end = 0, time.monotonic() + SAMPLED_SECONDS
    for number in chosen:
        if sampled >= SAMPLED_TASKS and time.monotonic() > end:
            break
        index = {} if count is None else {"index": number}
        _, info = env.reset(seed=number, options={"split": split, **index})
        row = {k: v for k, v in env.unwrapped.row.items() if k not in ("task_id", "split")} if with_row else None
        found[json.dumps([info["messages"], row], sort_keys=True, default=repr)] = info["task_id"]
        sampled += 1
    return sampled, found


def _same(one: list[Any], other: list[Any], what: str) -> None:
    for turn, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            raise CheckFailed(f"{what} differ in turn {turn}: {_difference(left, right)}")
    if len(one) != len(other):
        raise CheckFailed(f"{what} differ: {len(one) - 1} turns and {len(other) - 1}")


def _difference(left: Any, right: Any) -> str:
    names = ("observation", "reward", "terminated", "truncated", "info") if len(left) == 5 else ("observation", "info")
    for name, a, b in zip(names, left, right, strict=True):
        if a != b and name == "info":
            key = next(k for k in sorted({*a, *b}) if a.get(k) != b.get(k))
            return f"info[{key!r}] is {a.get(key)!r:.60} and {b.get(key)!r:.60}"
        if a != b:
            return f"{name} is {a!r:.60} and {b!r:.60}"
    return "they compare as different"


def _described(error: BaseException) -> str:
    """Type, first line and place of an exception, so that its author finds it."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:300]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text
