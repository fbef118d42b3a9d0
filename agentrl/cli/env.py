"""``agentrl env list`` and ``agentrl env show NAME``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from agentrl.config.values import parse_key_value
from agentrl.errors import ConfigError

USAGE = """\
usage: agentrl env list
       agentrl env show NAME [--env-arg KEY=VALUE ...]

List the registered environments, or show one: what it is, its splits, its tools, a first task.
NAME is what --env takes: a registered name, module:Class or path/to/file.py:Class."""


def usage(argv: Sequence[str]) -> str:
    """Help text."""
    return USAGE


def run(argv: Sequence[str]) -> int:
    """List or show; returns the exit code."""
    if not argv or argv[0] not in ("list", "show"):
        given = f", got {argv[0]!r}" if argv else ""
        raise ConfigError(f"agentrl env: expected `list` or `show NAME`{given}. `agentrl env --help` says more.")
    if argv[0] == "list":
        return _list(argv[1:])
    if len(argv) < 2 or argv[1].startswith("-"):
        raise ConfigError("agentrl env show: expected the name of an environment. `agentrl env list` shows them.")
    return _show(argv[1], _env_args(argv[2:]))


def _env_args(words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, sep, inline = rest.pop(0).partition("=")
        if flag != "--env-arg":
            raise ConfigError(f"agentrl env show: unknown argument {flag!r}; it takes --env-arg KEY=VALUE.")
        if not sep and not rest:
            raise ConfigError("--env-arg: expected KEY=VALUE, got nothing")
        key, value = parse_key_value(inline if sep else rest.pop(0), "--env-arg")
        values[key] = value
    return values


def _list(words: Sequence[str]) -> int:
    import agentrl

    if words:
        raise ConfigError(f"agentrl env list takes no arguments, got {' '.join(words)!r}")
    for name in agentrl.registered():
        print(name)
    return 0


def _show(name: str, env_args: dict[str, Any]) -> int:
    import agentrl

    env = agentrl.make(name, **env_args)
    try:
        for line in describe(env, name):
            print(line)
    finally:
        env.close()
    return 0


def describe(env: Any, name: str) -> list[str]:
    """What there is to know of an environment, as lines of text."""
    cls = type(env.unwrapped)
    lines = [f"{name}  ({cls.__module__}:{cls.__qualname__})", ""]
    if cls.__doc__:  # its own: that of ToolEnv, which it would inherit, says nothing about it
        lines += [inspect.cleandoc(cls.__doc__), ""]
    for split in env.unwrapped.splits:
        count = env.unwrapped.num_tasks(split)
        lines.append(f"split {split}: {'unlimited tasks' if count is None else f'{count} tasks'}")
    lines += [f"max turns: {env.unwrapped.max_turns}", ""]
    observation, info = env.reset(seed=0)
    for tool in info.get("tools", ()):
        function = tool.get("function", tool)
        arguments = ", ".join(function.get("parameters", {}).get("properties", {}))
        lines.append(f"tool {function['name']}({arguments}): {function.get('description', '')}")
    lines += ["", "a task:"]
    lines += [f"[{message['role']}] {message.get('content', '')}" for message in info.get("messages", ())] or [
        observation
    ]
    return lines
