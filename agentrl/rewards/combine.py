"""Finding reward functions by name, and adding several up."""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentrl.concurrency.event_loop import attend, ours
from agentrl.concurrency.threads import has_thread, own_thread, run_blocking
from agentrl.errors import AgentRLError, ConfigError, did_you_mean
from agentrl.loading import is_spec, load_object
from agentrl.rewards.choice import gpqa
from agentrl.rewards.mathematics import dapo, deepscaler, math_answer
from agentrl.rewards.number import reward_number
from agentrl.rewards.shared import SharedReward
from agentrl.rewards.signature import check_signature
from agentrl.rewards.text import exact_match, f1

RewardFunction = Callable[..., Any]

BUILT_IN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "f1": f1,
    "math": math_answer,
    "deepscaler": deepscaler,
    "dapo": dapo,
    "gpqa": gpqa,
}
"""Reward functions that go by a name."""

_instances: dict[type, Any] = {}
_making = threading.Lock()


def load(spec: str | RewardFunction | type) -> RewardFunction:
    """A reward function: itself, a name of :data:`BUILT_IN`, ``module:name`` or ``file.py:name``.

    Of a class, the process's one instance of it, made without arguments: all episodes share it.

    Raises ConfigError: unknown name (with the nearest one), not callable, or a class that needs arguments."""
    found = _find(spec)
    return _instance(found) if inspect.isclass(found) else found


def _find(spec: Any) -> Any:
    """The function or class that ``spec`` is or names. Nothing is made yet."""
    if isinstance(spec, str):
        if spec in BUILT_IN:
            return BUILT_IN[spec]
        if not is_spec(spec):
            raise ConfigError(
                f"unknown reward {spec!r}.{did_you_mean(spec, BUILT_IN)} Expected {', '.join(BUILT_IN)}, module:name "
                "or file.py:name."
            )
        spec = load_object(spec, "reward")
    if not callable(spec):
        raise ConfigError(f"a reward must be callable, got {spec!r}.")
    if inspect.isclass(spec):
        if not any("__call__" in vars(owner) for owner in spec.__mro__):
            raise ConfigError(f"the reward class {spec.__name__} needs a method `__call__(self, text, answer)`.")
        required = [p.name for p in _parameters(spec) if p.default is p.empty and p.kind not in _OPEN]
        if required and spec not in _instances:
            raise ConfigError(
                f"the reward class {spec.__name__} is made without arguments, but needs {', '.join(required)}: give "
                "them defaults, or give an instance as the reward."
            )
    return spec


def resolve(rewards: Any) -> list[tuple[float, RewardFunction | type]]:
    """What a :class:`RewardSet` takes (a function, class or name; ``(weight, reward)``, which JSON gives as a list; or
    a list of such) as pairs of weight and function or class. No model is loaded to look at it. Raises ConfigError as
    :func:`load`."""
    if isinstance(rewards, (tuple, list)) and len(rewards) == 2 and isinstance(rewards[0], (int, float)):
        return [(float(rewards[0]), _find(rewards[1]))]
    if isinstance(rewards, (list, tuple)):
        return [pair for entry in rewards for pair in resolve(entry)]
    return [] if rewards is None else [(1.0, _find(rewards))]


def compares(resolved: Iterable[tuple[float, Any]]) -> bool:
    """Whether a reward of :func:`resolve` compares with the answer alone, so that every task needs one."""
    compared = [BUILT_IN[name] for name in BUILT_IN if name != "gpqa"]  # which may find the letter elsewhere
    return any(reward is one for _, reward in resolved for one in compared)


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Any) -> Sequence[inspect.Parameter]:
    """Those that a caller gives. Of a method they are read once, whichever environment it is bound to."""
    written = getattr(function, "__func__", function)
    if isinstance(written, types.FunctionType):
        return _read(written, function is not written)
    return tuple(inspect.signature(function).parameters.values())


@functools.lru_cache(maxsize=256)
def _read(function: types.FunctionType, bound: bool) -> Sequence[inspect.Parameter]:
    called = types.MethodType(function, function) if bound else function
    return tuple(inspect.signature(called).parameters.values())


def _instance(cls: type) -> Any:
    """The instance of this process. Episodes that ask at the same time wait for one to be made.
    Raises ConfigError: its constructor raises, so no episode can ever be judged. InfraError and other errors of ours
    pass."""
    with _making:
        if cls not in _instances:
            try:
                _instances[cls] = cls()
            except AgentRLError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"the reward class {cls.__name__} could not be made: {type(error).__name__}: {error}"
                ) from error
        return _instances[cls]


def _name(reward: Any) -> str:
    """Under which name a reward is logged: its ``name``, or that of the function or class."""
    given = getattr(reward, "name", None)
    return given if isinstance(given, str) and given else getattr(reward, "__name__", type(reward).__name__)


NAMED = ("turns", "calls", "row")
"""What a reward function may ask for by name."""

REHEARSING: contextvars.ContextVar[bool] = contextvars.ContextVar("agentrl_rehearsing", default=False)
"""Whether the episode is only tried out: then no model is loaded and no judge is asked, their parts are 0."""


def check_signatures(rewards: Any, named: Sequence[str] = NAMED) -> None:
    """Refuses functions among ``rewards`` that cannot be called as they will be; see :func:`check_signature`."""
    for _, function in resolve(rewards):
        check_signature(function, _name(function), named)


class RewardSet:
    """Weighted reward functions, each logged by its name: functions, classes, names, or ``(weight, function)`` pairs;
    None for none. Classes are made at the first call, in a thread, since they may load a model."""

    def __init__(self, rewards: Any) -> None:
        self.parts: list[tuple[str, float, RewardFunction]] = []
        for weight, function in resolve(rewards):
            name = _name(function)
            same = sum(taken == name or taken.startswith(f"{name}_") for taken, _, _ in self.parts)
            self.parts.append((f"{name}_{same + 1}" if same else name, weight, function))

    async def __call__(self, text: str, answer: Any, **named: Any) -> dict[str, float]:
        """The weighted parts by name.

        Args:
            text: The model's final text.
            answer: The task's answer.
            **named: What functions may ask for by name, of :data:`NAMED`.

        Raises:
            EnvError: A function returned something that is not a finite number or a dict of them.
        """
        result: dict[str, float] = {}
        for name, weight, function in self.parts:
            if REHEARSING.get() and (inspect.isclass(function) or isinstance(function, SharedReward)):
                result[name] = result.get(name, 0.0)
                continue
            if inspect.isclass(function):
                made = _instances.get(function)
                function = await run_blocking(_instance, function) if made is None else made
            value = await _call(function, text, answer, named)
            for part, number in (value if isinstance(value, dict) else {name: value}).items():
                result[part] = result.get(part, 0.0) + weight * reward_number(number, f"what the reward {name!r} gave")
        return result


async def _call(function: RewardFunction, text: str, answer: Any, named: dict[str, Any]) -> Any:
    parameters = _parameters(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    free = [p for p in positional if p.name not in named or p.kind is p.VAR_POSITIONAL]
    arguments = (text, answer) if len(free) > 1 or any(p.kind is p.VAR_POSITIONAL for p in free) else (text,)
    keywords = {k: v for k, v in named.items() if everything or k in names}
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        if ours(function if hasattr(function, "__name__") else type(function).__call__):
            return await function(*arguments, **keywords)
        return await attend(f"the reward {_name(function)!r}", function, *arguments, **keywords)
    of = getattr(function, "__self__", None)  # a method of an environment, which may use what its task opened
    run = own_thread(of).run if of is not None and has_thread(of) else run_blocking
    value = await run(function, *arguments, **keywords)
    return await value if inspect.isawaitable(value) else value
