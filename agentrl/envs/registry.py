"""Names of environments: registering, listing, finding and making them.

An environment is named by ``search`` (registered, or of the entry-point group ``agentrl.envs``),
``agentrl/search-v0`` (a Gymnasium id), ``package.module:Class`` or ``path/to/file.py:Class``.
"""

from __future__ import annotations

import copy
import difflib
import importlib.metadata
import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from agentrl._gymnasium import BUILT_IN
from agentrl.envs.core import Env
from agentrl.errors import ConfigError
from agentrl.loading import is_spec, load_file, load_object, portable

ENTRY_POINT_GROUP = "agentrl.envs"
_NAME = re.compile(r"[A-Za-z][\w-]*\Z")
_GYM_ID = re.compile(r"(?:[\w:.-]+/)?[\w:.-]+-v\d+\Z")


@dataclass(frozen=True)
class EnvEntry:
    """Where an environment is found. Means the same in every process and working directory."""

    name: str
    entry_point: str  # "module:Class", "/abs/file.py:Class", or the id of a Gymnasium registration
    kwargs: dict[str, Any] = field(default_factory=dict)


_registry: dict[str, EnvEntry] = {}


def register(name: str, entry_point: str, **kwargs: Any) -> None:
    """Gives an environment a name, here and as ``agentrl/<name>-v0`` in Gymnasium.

    The name holds in this process only. For the command line, publish it as an entry point of the group
    ``agentrl.envs`` in your package, or give ``--env`` the ``module:Class`` itself.

    Args:
        name: Letters, digits, ``-`` and ``_``. Registering a name again replaces it.
        entry_point: ``module:Class`` or ``path/to/file.py:Class``; imported when first made.
        **kwargs: Default arguments of the constructor.

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
    """The entry that ``spec`` names.

    Raises:
        ConfigError: Nothing has that name; the text gives the nearest one.
    """
    if spec in _registry:
        return _registry[spec]
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
    near = difflib.get_close_matches(spec, names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
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


def make(spec: str | type[Env], **kwargs: Any) -> Env:
    """A new environment.

    Args:
        spec: A name (``search``, of :func:`registered`), a Gymnasium id (``agentrl/search-v0``),
            ``package.module:Class``, ``path/to/file.py:Class``, or a subclass of :class:`Env` itself.
        **kwargs: Arguments of its constructor, and the settings every environment takes (``max_turns``, ...).

    Raises:
        ConfigError: Unknown name, not an :class:`Env`, or an argument it does not take.
    """
    if inspect.isclass(spec) and issubclass(spec, Env):
        _check_arguments(spec, kwargs, spec.__name__)
        env = spec(**kwargs)
        env.spec = EnvSpec(id=f"agentrl/{spec.__name__}-v0", entry_point=spec, kwargs=kwargs)
        return env
    if not isinstance(spec, str):
        raise ConfigError(f"expected the name of an environment or a subclass of agentrl.Env, got {spec!r:.80}.")
    entry = find(spec)
    if entry.entry_point in gymnasium.registry:
        env = gymnasium.make(entry.entry_point, **kwargs).unwrapped
        if not isinstance(env, Env):
            raise ConfigError(f"environment {spec!r} is a {type(env).__name__}, not an agentrl.Env.")
        return env
    cls = load_object(entry.entry_point, "environment")
    if not (inspect.isclass(cls) and issubclass(cls, Env)):
        raise ConfigError(f"environment {spec!r}: {entry.entry_point} is {cls!r}, not a subclass of agentrl.Env.")
    arguments = {**copy.deepcopy(entry.kwargs), **kwargs}
    _check_arguments(cls, arguments, spec)
    env = cls(**arguments)
    env.spec = _gym_spec(entry, arguments)
    return env


def _check_arguments(cls: type[Env], arguments: dict[str, Any], spec: str) -> None:
    parameters = inspect.signature(cls).parameters
    known = {name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known |= set(cls.settings)
    unknown = [name for name in arguments if name not in known]
    if unknown and (not open_ended or cls.__init__ is Env.__init__):
        near = difflib.get_close_matches(unknown[0], sorted(known), 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"environment {spec!r} takes no argument {unknown[0]!r}.{hint} It takes: {', '.join(sorted(known))}."
        )
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in arguments
    ]
    if missing:
        raise ConfigError(f"environment {spec!r} needs the argument {missing[0]!r}.")


def _gym_spec(entry: EnvEntry, arguments: dict[str, Any]) -> EnvSpec:
    name = entry.name if _NAME.match(entry.name) else entry.entry_point.rpartition(":")[2]
    kwargs = {**entry.kwargs, **arguments}
    if ".py:" in entry.entry_point:
        # Gymnasium imports its entry points as modules; a file is found by our own loader.
        point, kwargs = f"{__name__}:make", {"spec": entry.entry_point, **kwargs}
    else:
        point = entry.entry_point
    return EnvSpec(id=f"agentrl/{name}-v0", entry_point=point, kwargs=kwargs)


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


for _name, _entry_point in BUILT_IN.items():
    _registry[_name] = EnvEntry(_name, _entry_point)
