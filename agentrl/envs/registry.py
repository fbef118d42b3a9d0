"""Names of environments: registering, listing, finding and making them.

An environment is named by ``search`` (registered, or of the entry-point group ``agentrl.envs``),
``agentrl/search-v0`` (a Gymnasium id), ``package.module:Class``, ``path/to/file.py:Class``, or ``gym:FrozenLake-v1``
(any Gymnasium environment, played in text). In place of the class may stand a function that returns an
environment, in wrappers or not.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from agentrl._gymnasium import BUILT_IN
from agentrl.envs.core import Env
from agentrl.envs.wrappers.base import Wrapper
from agentrl.errors import ConfigError, did_you_mean
from agentrl.loading import is_spec, load_file, load_object, portable

ENTRY_POINT_GROUP = "agentrl.envs"
GYM = "gym:"
"""Before the id of a Gymnasium environment: :class:`~agentrl.envs.adapters.gymnasium.GymEnv` plays it in text."""
PASSING = (OrderEnforcing, PassiveEnvChecker)
"""Wrappers that ``gymnasium.make`` puts around everything, and that change nothing."""
_NAME = re.compile(r"[A-Za-z][\w-]*\Z")
_GYM_ID = re.compile(r"(?:[\w:.-]+/)?[\w:.-]+-v\d+\Z")


@dataclass(frozen=True)
class EnvEntry:
    """Where an environment is found. Means the same in every process and working directory."""

    name: str
    entry_point: str  # "module:Class", "/abs/file.py:make_env", or the id of a Gymnasium registration
    kwargs: dict[str, Any] = field(default_factory=dict)


_registry: dict[str, EnvEntry] = {}


def register(name: str, entry_point: str, **kwargs: Any) -> None:
    """Gives an environment a name, here and as ``agentrl/<name>-v0`` in Gymnasium.

    The name holds in this process only. For the command line, publish it as an entry point of the group
    ``agentrl.envs`` in your package, or give ``--env`` the ``module:Class`` itself.

    Args:
        name: Letters, digits, ``-`` and ``_``. Registering a name again replaces it.
        entry_point: ``module:Class`` or ``path/to/file.py:Class``, or a function in the place of the class that
            returns an :class:`Env`, in wrappers or not; imported when first made.
        **kwargs: Default arguments of the constructor or function.

    Raises:
        ConfigError: The name or the entry point has not that form.
    """
    if not _NAME.match(name):
        raise ConfigError(f"environment name {name!r}: expected letters, digits, - and _, starting with a letter.")
    if not isinstance(entry_point, str) or not is_spec(entry_point):
        raise ConfigError(f"environment {name!r}: the entry point must be module:Class, got {entry_point!r}.")
    entry = EnvEntry(name, portable(entry_point), dict(kwargs))
    _registry[name] = entry
    spec = _gym_spec(entry, {})
    gymnasium.registry[spec.id] = spec


def registered() -> list[str]:
    """Names that :func:`make` knows: registered ones and those of installed packages, sorted."""
    return sorted({*_registry, *(point.name for point in _entry_points())})


def find(spec: str) -> EnvEntry:
    """The entry that ``spec`` names. Raises ConfigError: nothing has that name; the text gives the nearest one."""
    if spec in _registry:
        return _registry[spec]
    if spec.startswith(GYM):
        return EnvEntry(spec, "agentrl.envs.adapters.gymnasium:GymEnv", {"id": spec.removeprefix(GYM)})
    if match := re.fullmatch(r"agentrl/([\w-]+?)(?:-v0)?", spec):
        return find(match.group(1))
    for point in _entry_points():
        if point.name == spec:
            return EnvEntry(spec, point.value)
    if spec.removesuffix(":").endswith(".py"):
        raise ConfigError(_class_missing(spec.removesuffix(":")))
    if spec in gymnasium.registry:
        return EnvEntry(spec, spec)
    if is_spec(spec) and not _GYM_ID.match(spec):
        return EnvEntry(spec.rpartition(":")[2], portable(spec))
    names = registered()
    hint = did_you_mean(spec, names)
    raise ConfigError(
        f"unknown environment {spec!r}.{hint} Known: {', '.join(names)}; or give module:Class or path/to/file.py:Class."
    )


def _class_missing(path: str) -> str:
    """What to say of a file without a class behind it: those that could be meant."""
    module = load_file(path, "environment")
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Env) and value.__module__ == module.__name__
    ]
    if not names:
        return f"environment {path!r}: no subclass of agentrl.Env or agentrl.ToolEnv is defined in that file."
    return (
        f"environment {path!r} names no class: add :ClassName, as in {f'{path}:{names[0]}'!r}. "
        f"Environments in the file: {', '.join(names)}."
    )


def make(spec: str | type[Env] | Callable[..., Any], **kwargs: Any) -> Env | Wrapper:
    """A new environment.

    Args:
        spec: A name (``search``, of :func:`registered`), a Gymnasium id (``agentrl/search-v0``),
            ``package.module:Class``, ``path/to/file.py:Class``, ``gym:FrozenLake-v1``, or a subclass of
            :class:`Env` itself. A function that returns an environment may stand for the class.
        **kwargs: Arguments of its constructor, and the settings every environment takes (``max_turns``, ...).

    Raises:
        ConfigError: Unknown name, not an :class:`Env`, or an argument it does not take.
    """
    if inspect.isroutine(spec) or (inspect.isclass(spec) and issubclass(spec, gymnasium.Env)):
        env = _built(spec, kwargs, spec.__name__)
        its_id = f"agentrl/{type(env.unwrapped).__name__}-v0"
        env.unwrapped.spec = EnvSpec(its_id, entry_point=f"{__name__}:make", kwargs={"spec": spec, **kwargs})
        return env
    if not isinstance(spec, str):
        raise ConfigError(f"expected the name of an environment or a subclass of agentrl.Env, got {spec!r:.80}.")
    entry = find(spec)
    if entry.entry_point in gymnasium.registry:
        return with_async(gymnasium.make(entry.entry_point, **kwargs), spec)
    arguments = {**copy.deepcopy(entry.kwargs), **kwargs}
    env = _built(load_object(entry.entry_point, "environment"), arguments, spec, entry.entry_point)
    env.unwrapped.spec = _gym_spec(entry, kwargs)
    return env


def _built(maker: Any, arguments: dict[str, Any], spec: str, entry_point: str = "") -> Env | Wrapper:
    """What a class or function makes of ``arguments``."""
    named = f"environment {spec!r}: {entry_point or spec}"
    if inspect.isclass(maker) and issubclass(maker, Env):
        _check_arguments(maker, arguments, spec, maker.settings, free=maker.__init__ is not Env.__init__)
        return maker(**arguments)
    if inspect.isclass(maker) and issubclass(maker, gymnasium.Wrapper):
        raise ConfigError(
            f"{named} is a wrapper and needs an environment: write a function that returns "
            f"{maker.__name__}(YourEnv()), and name the function."
        )
    if not inspect.isroutine(maker):
        raise ConfigError(
            f"{named} is {maker!r:.80}, not a subclass of agentrl.Env or a function that returns an environment."
        )
    # Settings that the function does not name are those of the environment inside.
    parameters = inspect.signature(maker).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    late = {} if takes_all else {k: v for k, v in arguments.items() if k in Env.settings and k not in parameters}
    arguments = {k: v for k, v in arguments.items() if k not in late}
    _check_arguments(maker, arguments, spec, Env.settings)
    made = with_async(maker(**arguments), spec, f"{named} returned")
    for name, value in late.items():
        setattr(made.unwrapped, name, value)
    return made


def with_async(env: Any, spec: str, found: str = "") -> Env | Wrapper:
    """``env`` with async entry points: under Gymnasium's own wrappers only if somebody asked for those."""
    if not isinstance(env, gymnasium.Env) or not isinstance(env.unwrapped, Env):
        kind = type(env.unwrapped if isinstance(env, gymnasium.Env) else env).__name__
        hint = ""
        if isinstance(env, gymnasium.Env):
            name = env.spec.id if env.spec is not None else "ID"
            hint = f" To play it in text: {GYM}{name}."
        raise ConfigError(f"{found or f'environment {spec!r} is'} a {kind}, not an agentrl.Env.{hint}")
    while isinstance(env, PASSING):
        env = env.env
    return env if isinstance(env, (Env, Wrapper)) else Wrapper(env)


def _check_arguments(
    maker: Any, arguments: dict[str, Any], spec: str, settings: Sequence[str], *, free: bool = True
) -> None:
    """Refuses arguments that the class or function does not take, or lacks; ``free``: its ``**kwargs`` take any."""
    parameters = inspect.signature(maker).parameters
    known = {name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known |= set(settings)
    unknown = [name for name in arguments if name not in known]
    if unknown and not (open_ended and free):
        hint = did_you_mean(unknown[0], sorted(known))
        takes = f"It takes: {', '.join(sorted(known))}." if known else "It takes none."
        raise ConfigError(f"environment {spec!r} takes no argument {unknown[0]!r}.{hint} {takes}")
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in arguments
    ]
    if missing:
        raise ConfigError(f"environment {spec!r} needs the argument {missing[0]!r}.")


def _gym_spec(entry: EnvEntry, arguments: dict[str, Any]) -> EnvSpec:
    """By which Gymnasium makes the same environment: through :func:`make`, which finds files and calls functions."""
    name = entry.name if _NAME.match(entry.name) else entry.entry_point.rpartition(":")[2]
    spec = entry.name if entry.name.startswith(GYM) else entry.entry_point
    kwargs = arguments if spec == entry.name else {**entry.kwargs, **arguments}
    return EnvSpec(id=f"agentrl/{name}-v0", entry_point=f"{__name__}:make", kwargs={"spec": spec, **kwargs})


@functools.cache  # reads a file of each installed package, and a run makes a thousand environments
def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


for _name, _entry_point in BUILT_IN.items():
    _registry[_name] = EnvEntry(_name, _entry_point)


def make_env(
    spec: str, kwargs: dict[str, Any], *, tool_timeout: float | None = None, sandbox: str | None = None
) -> Any:
    """The environment that ``spec`` names, with what the command line says about it.
    Raises ConfigError: ``--tool-timeout`` for an environment that has no tools."""
    env = make(spec, **kwargs)
    if tool_timeout is not None:
        if not hasattr(env.unwrapped, "tool_timeout"):
            raise ConfigError(f"--tool-timeout {tool_timeout:g}: {spec!r} is no ToolEnv, so it has no such limit")
        env.unwrapped.tool_timeout = tool_timeout
    if sandbox is not None and hasattr(env.unwrapped, "sandbox"):
        env.unwrapped.sandbox = sandbox
    return env
