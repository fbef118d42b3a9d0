"""Checks of an environment before it is trained on: ``agentrl env check NAME``, or :func:`check_env` in a test."""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import inspect
import itertools
import json
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import env_checker

from agentrl.concurrency.event_loop import holders, ours
from agentrl.concurrency.threads import run_blocking, run_coroutine
from agentrl.envs.adapters.gymnasium import GymEnv
from agentrl.envs.checks.fuzz import fuzz_actions
from agentrl.envs.checks.info import CheckFailed, check_end, check_json, check_messages, check_start, check_tools
from agentrl.envs.core import Env
from agentrl.envs.registry import make as make_env
from agentrl.envs.registry import with_async
from agentrl.envs.tool_env import ToolEnv, check_machine
from agentrl.envs.wrappers.base import Wrapper
from agentrl.errors import AgentRLError, ConfigError, authors_frames, is_authors
from agentrl.rewards.number import reward_number

Make = Callable[[], Env | Wrapper]

SAMPLED_TASKS = 32
"""Tasks of each split whose beginning is compared with that of the others."""
MOST_TASKS = 2000
"""Tasks of each split that are compared where all of a task is known, in ``SAMPLED_SECONDS`` as many as fit."""
SAMPLED_SECONDS = 2.0
TURNS = 12
"""Turns of an episode that is played for comparison."""
CHECK_SECONDS = 30.0
"""Time of one check. One that takes longer hangs, and ends the rest."""
ALL_SECONDS = 55.0
"""Time of all checks; those that it does not suffice for are skipped."""
FUZZ_SECONDS = 10.0
"""Time for text that breaks things, of which as much is tried as fits."""


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
    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    return Report(name, list(run_checks(maker_of(env, env_args))))


def run_checks(make: Make, starting: Callable[[str], object] = str) -> Iterator[CheckResult]:
    """The checks one after another, each as it ends; ``starting`` is called with the name of each before.
    Raises AgentRLError: the environment cannot be made, for a reason of ours."""
    try:
        made = make()
        try:
            check_machine(made)
        finally:
            made.close()
    except AgentRLError:
        raise
    except Exception as error:  # the author's constructor may raise anything
        yield CheckResult("can be made", "failed", _described(error))
        return
    end = time.monotonic() + ALL_SECONDS
    known = {key: holder.held for key, holder in holders.items()}
    failed: dict[str, str] = {}
    for check in CHECKS:
        name = name_of(check)
        starting(name)
        if (left := end - time.monotonic()) <= 0:
            yield CheckResult(name, "skipped", f"{ALL_SECONDS:g} s are over")
            continue
        result = _run(check, make, min(CHECK_SECONDS, left))
        if result.outcome == "failed" and result.reason in failed:
            result = CheckResult(name, "skipped", f"fails for the same reason as {failed[result.reason]!r}")
        failed.setdefault(result.reason, name)
        hangs, blocking = result.reason.startswith(_HANGS), _blocking(known)
        if hangs and blocking.outcome == "failed":  # that is why, and no single call need hang
            result = CheckResult(name, "skipped", f"was not done in time, see {BLOCKING!r}")
        yield result
        if hangs:
            break
    yield _blocking(known)


def name_of(check: Callable[..., Any]) -> str:
    """The name of a check, as reports have it."""
    return check.__name__.removeprefix("_check_").replace("_", " ")


BLOCKING = "never blocks"


def _blocking(known: dict[Any, int]) -> CheckResult:
    """Coroutines that held up the event loop during the checks, again and again."""
    found = [holder for key, holder in holders.items() if holder.held - known.get(key, 0) > 1]
    if found:
        return CheckResult(BLOCKING, "failed", max(found, key=lambda holder: holder.seconds).sentence())
    return CheckResult(BLOCKING, "passed")


def maker_of(env: Any, env_args: dict[str, Any]) -> Make:
    if not isinstance(env, gymnasium.Env):
        return lambda: make_env(env, **env_args)
    spec = env.spec
    if env_args or spec is None:
        raise ConfigError(
            "check_env makes several environments: give it a name, a class or a function, or an environment that "
            "agentrl.make made, without further arguments."
        )
    return lambda: with_async(gymnasium.make(spec), spec.id)


_HANGS = "hangs: "


def _run(check: Callable[[Make], str | None], make: Make, seconds: float) -> CheckResult:
    name = name_of(check)
    _doing.clear()
    try:
        # In a thread: an environment that hangs must not hang the checker.
        reason = run_coroutine(asyncio.wait_for(run_blocking(_noting, check, make), seconds))
    except NothingToCheck as why:
        return CheckResult(name, "skipped", str(why))
    except CheckFailed as why:
        return CheckResult(name, "failed", str(why))
    except TimeoutError as error:
        if authors_frames(error):
            return CheckResult(name, "failed", _described(error))
        doing = _doing[-1] if _doing else "the environment"
        place = _where_it_hangs()
        return CheckResult(name, "failed", f"{_HANGS}{doing} did not come back within {seconds:.2g} s{place}")
    except Exception as error:  # the author's code may raise anything
        return CheckResult(name, "failed", _described(error))
    return CheckResult(name, "passed", reason or "")


_doing: list[str] = []
"""What the environment is doing, the last one at the moment."""


def _noting(check: Callable[[Make], str | None], make: Make) -> str | None:
    """A check of an environment whose calls are noted, so that the one that hangs can be named."""

    def noting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            _doing.append(f"{name} on {_brief(args[0])}" if args else name)
            return method(*args, **kwargs)

        return call

    def made() -> Env | Wrapper:
        env = make()
        for name in ("reset", "step", "areset", "astep"):
            vars(env.unwrapped)[name] = noting(getattr(env.unwrapped, name), name)
        return env

    return check(made)


def _where_it_hangs() -> str:
    """The author's line in a thread of ours that is at work; nothing where it awaits what never comes."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("agentrl-")}
    for number, frame in sys._current_frames().items():
        lines = [line for line in traceback.extract_stack(frame) if is_authors(line.filename)]
        if number in ours and lines:
            return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno} in {lines[-1].name})"
    return ""


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
    episodes, tried, end = 1, 0, time.monotonic() + FUZZ_SECONDS
    for action in actions:
        if time.monotonic() > end:
            break
        tried += 1
        try:
            *_, terminated, truncated, info = _checked_step(env, action)
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(f"step raised on {_brief(action)}: {_described(error)}") from error
        if len(info["messages"]) > len(start) and info["messages"][: len(start)] == start:
            raise CheckFailed("info['messages'] after a step repeats the conversation; it holds the new messages only")
        if terminated or truncated:
            check_end(info)
            start = env.reset(seed=episodes)[1]["messages"]
            episodes += 1
    env.close()
    some = "" if tried == len(actions) else f" of {len(actions)}, as many as fit into {FUZZ_SECONDS:g} s"
    return f"{tried} actions{some}, {episodes} episodes"


def _check_both_ways_alike(make: Make) -> None:
    """``reset`` and ``step`` give what ``areset`` and ``astep`` give."""
    env = make()
    asynchronous = list(
        _turns(env, 11, lambda **given: run_coroutine(env.areset(**given)), lambda text: run_coroutine(env.astep(text)))
    )
    run_coroutine(env.aclose())
    _same(_episode(make(), 11), asynchronous, "step and astep")


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
    together: list[list[Any]] = [[], []]
    for turns in itertools.zip_longest(*(_turns(env, seed) for env, seed in zip(both, (1, 2), strict=True))):
        for out, turn in zip(together, turns, strict=True):
            out += [] if turn is None else [turn]
    for env in both:
        env.close()
    for one, other in zip(alone, together, strict=True):
        _same(one, other, "an episode alone and beside another")


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
    check_tools(tools)
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


def _check_names(make: Make) -> None:
    """No attribute of the author's class is a setting or a method of ours, misspelt."""
    env = make()
    env.close()
    cls = type(env.unwrapped)
    theirs = [owner for owner in cls.__mro__ if issubclass(owner, Env) and not ours(owner)]
    base = next(owner for owner in cls.__mro__ if issubclass(owner, Env) and ours(owner))
    known = [name for name in dir(base) if not name.startswith("_")]
    for owner in theirs:
        for name in vars(owner):
            near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
            if name.startswith("_") or name in known or not near or any(_uses(other, name) for other in theirs):
                continue
            raise CheckFailed(f"{owner.__name__}.{name} is used by nothing. Did you mean {near[0]!r}?")


def _uses(cls: type, name: str) -> bool:
    """Whether a method of ``cls`` reads an attribute of that name."""
    codes = [getattr(inspect.unwrap(getattr(v, "function", v)), "__code__", None) for v in vars(cls).values()]
    while codes:
        code = codes.pop()
        if code is not None:
            if name in code.co_names:
                return True
            codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return False


CHECKS = (
    _check_names,
    _check_gymnasium,
    _check_any_text,
    _check_both_ways_alike,
    _check_seed_decides,
    _check_instances_are_apart,
    _check_tool_schemas,
    _check_splits_are_disjoint,
)


# -- parts of them ----------------------------------------------------------------------------------


def _actions(env: Env | Wrapper, info: dict[str, Any], rng: np.random.Generator) -> list[str]:
    """Actions that make sense first, since others may end the episode."""
    return [*env.example_actions, *fuzz_actions(info.get("tools") or (), env.call_format, rng)]


def _turns(env: Env | Wrapper, seed: int, reset: Any = None, step: Any = None) -> Iterator[Any]:
    """What a short episode gives, turn by turn, by ``env.reset`` and ``env.step`` unless others are given."""
    start = (reset or env.reset)(seed=seed)
    yield copy.deepcopy(start)
    actions = _actions(env, start[1], np.random.default_rng(1))[: TURNS - 1]
    for action in [*actions, "an answer"]:
        turn = step(action) if step else _checked_step(env, action)
        yield copy.deepcopy(turn)
        if turn[2] or turn[3]:
            return


def _episode(env: Env | Wrapper, seed: int, *, close: bool = True) -> list[Any]:
    turns = list(_turns(env, seed))
    if close:
        env.close()
    return turns


def _checked_step(env: Env | Wrapper, action: str) -> Any:
    """A step whose form, messages and ``info`` are as promised; ``Env`` itself checks types and rewards."""
    result = env.step(action)
    info = result[4]
    if result[0] not in env.observation_space:
        raise CheckFailed(f"the observation {result[0]!r:.60} is not in {env.observation_space!r}")
    check_messages(info["messages"], "info['messages']")
    for name, value in (info.get("rewards") or {}).items():
        reward_number(value, f"info['rewards'][{name!r}]")
    check_json(info, "step")
    return result


def _tasks(env: Any, split: str, most: int, *, with_row: bool = False) -> tuple[int, dict[str, str]]:
    """How many tasks were sampled; and their first messages (and rows) as JSON, each with the id of one such task."""
    count = env.num_tasks(split)
    chosen = range(most) if count is None else random.Random(0).sample(range(count), min(count, most))
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
            one, other = _differing(a.get(key), b.get(key))
            return f"info[{key!r}] is {one} and {other}"
        if a != b:
            one, other = _differing(a, b)
            return f"{name} is {one} and {other}"
    return "they compare as different"


def _differing(a: Any, b: Any, length: int = 60) -> tuple[str, str]:
    """Two values as text, cut to where they differ."""
    one, other = repr(a), repr(b)
    same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    if same < length // 2:
        return one[:length], other[:length]
    begin = same - length // 3
    return f"…{one[begin : begin + length]}", f"…{other[begin : begin + length]}"


def _brief(action: Any) -> str:
    text = repr(action)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _described(error: BaseException) -> str:
    """Type, first line and the author's own place of an exception, so that its author finds it.

    What we found wrong with something that the author returned has no such place.
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:300]
    frames = authors_frames(error)
    if not frames and not isinstance(error, AgentRLError):
        frames = list(traceback.extract_tb(error.__traceback__))
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else text
