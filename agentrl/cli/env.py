"""``agentrl env``: list environments, show, check and play one, begin a new one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agentrl.cli.main import WORDS, help_of
from agentrl.config.layers import load_options
from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes.signals import printable

if TYPE_CHECKING:
    from agentrl.envs.core import Env
    from agentrl.envs.wrappers.base import Wrapper

ACTIONS: dict[str, str] = {name: words["about"] for name, words in WORDS["env"].items() if isinstance(words, dict)}


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Environment"""

    env_args: dict[str, Any] = field(default_factory=dict)
    """Argument of the environment as `KEY=VALUE`; the value is read as JSON where it is JSON. Repeatable."""


@dataclass(frozen=True, kw_only=True)
class PlayedOptions(ShowOptions):
    """Environment"""

    sandbox: Literal["auto", "bubblewrap", "container", "process"] | None = None
    """How tools run code of a policy, where the environment has such tools; `process` is no security boundary."""

    def arguments(self) -> dict[str, Any]:
        """What the environment's constructor is given."""
        return {**self.env_args, **({"sandbox": self.sandbox} if self.sandbox else {})}


def usage(argv: Sequence[str]) -> str:
    """Help text, of an action if one is named."""
    action = next((word for word in argv if word in ACTIONS), None)
    if action in ("check", "play", "new"):
        return help_of(importlib.import_module(f"agentrl.cli.env_{action}"))
    if action == "show":
        from agentrl.config.help import command_help

        return command_help("env show NAME [OPTIONS]", f"Show {ACTIONS['show']}.", ShowOptions)
    lines = [f"  {name:<6} {what}" for name, what in ACTIONS.items()]
    return "\n".join([f"usage: agentrl {WORDS['env']['synopsis']}", "", *lines, "", WORDS["env"]["intro"]])


def run(argv: Sequence[str]) -> int:
    """One action; returns the exit code."""
    action, rest = (argv[0], argv[1:]) if argv else ("", ())
    if action not in ACTIONS:
        given = f", got {action!r}" if argv else ""
        raise ConfigError(f"agentrl env: expected one of {', '.join(ACTIONS)}{given}. `agentrl env --help` says more.")
    if action == "list":
        return _list(rest)
    if not rest or rest[0].startswith("-"):
        what = "the name of the new environment, such as warehouse" if action == "new" else "the name of an environment"
        raise ConfigError(f"agentrl env {action}: expected {what}. `agentrl env list` shows those there are.")
    if action == "show":
        return _show(rest[0], load_options(ShowOptions, rest[1:]).env_args)
    return importlib.import_module(f"agentrl.cli.env_{action}").run(rest[0], rest[1:])


def _list(words: Sequence[str]) -> int:
    import agentrl

    if words:
        raise ConfigError(f"agentrl env list takes no arguments, got {' '.join(words)!r}")
    rows = [(name, *_about(name)) for name in agentrl.registered()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, splits, text in rows:
        print(f"{name:<{widths[0]}}  {splits:<{widths[1]}}  {text}".rstrip())
    return 0


def _about(name: str) -> tuple[str, str]:
    """Splits and a line on an environment, without making it. One that cannot be loaded must not hide the others."""
    try:
        made_by = _maker(name)
    except Exception as error:  # a module of somebody else's
        kind = "" if isinstance(error, (AgentRLError, ImportError)) else f"{type(error).__name__}: "
        return "", f"cannot be loaded: {kind}{(str(error).splitlines() or [''])[0]}"
    splits = ", ".join(getattr(made_by, "splits", ()))
    text = inspect.cleandoc(made_by.__doc__ or "")
    return splits, text.split("\n\n")[0].replace("\n", " ").replace("`", "")


def _maker(name: str) -> Any:
    """The class or function that makes the environment ``name``; None where Gymnasium knows it."""
    import gymnasium

    from agentrl.envs.registry import find
    from agentrl.loading import load_object

    entry_point = find(name).entry_point
    return None if entry_point in gymnasium.registry else load_object(entry_point, "environment")


def _show(name: str, env_args: dict[str, Any]) -> int:
    import agentrl

    env = agentrl.make(name, **env_args)
    try:
        for line in describe(env, name, _maker(name) or type(env.unwrapped)):
            print(line)
    finally:
        env.close()
    return 0


def describe(env: Env | Wrapper, name: str, maker: Any) -> list[str]:
    """What there is to know of an environment, as lines of text; ``maker``: the class or function that made it."""
    cls = type(env.unwrapped)
    place = inspect.getsourcefile(cls) if cls.__module__.startswith("agentrl_file_") else cls.__module__
    lines = [f"{name}  ({place}:{cls.__qualname__})", ""]
    for made_by in dict.fromkeys((maker, cls)):
        if made_by.__doc__:  # its own: that of ToolEnv, which a class would inherit, says nothing about it
            lines += [inspect.cleandoc(made_by.__doc__), ""]
    for split in env.splits:
        count = env.num_tasks(split)
        lines.append(f"split {split}: {'unlimited tasks' if count is None else f'{count} tasks'}")
    lines.append(f"max turns: {env.max_turns}")
    wrappers = str(env).count("<") - str(env.unwrapped).count("<")
    if wrappers:
        lines.append(f"wrapped: {env}")
    lines += ["", "arguments (--env-arg):", *_arguments(maker, env.unwrapped), ""]
    observation, info = env.reset(seed=0)
    lines += tool_lines(info.get("tools") or ())
    lines += ["", "a task:", *message_lines(info, observation)]
    return lines


def _arguments(maker: Any, env: object) -> list[str]:
    """Those of the class or function, with defaults, and the settings of ``env`` that may be given beside them."""
    from agentrl.envs.core import Env

    settings = Env.settings
    if inspect.isclass(maker):
        env, settings = maker, getattr(maker, "settings", ())
    parameters = [
        p for p in inspect.signature(maker).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    named = {p.name: "needed" if p.default is p.empty else repr(p.default) for p in parameters}
    known = {**{name: repr(getattr(env, name, None)) for name in settings}, **named}
    return [f"  {name} = {value}" for name, value in known.items() if name != "render_mode"]


def tool_lines(tools: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each tool: name, parameters, what it does."""
    lines = []
    for tool in tools:
        function = tool.get("function", tool)
        arguments = ", ".join(function.get("parameters", {}).get("properties", {}))
        lines.append(printable(f"tool {function['name']}({arguments}): {function.get('description', '')}"))
    return lines


def message_lines(info: dict[str, Any], observation: str = "") -> list[str]:
    """The messages of a reset or step, each under its role; those of every agent where there are several."""
    lines = []
    for agent, prompt in (info.get("prompts") or {}).items():
        messages = prompt.get("messages", ()) if isinstance(prompt, dict) else [{"role": "system", "content": prompt}]
        lines += [f"[{agent}: {message['role']}] {message.get('content', '')}" for message in messages]
    lines += [f"[{message['role']}] {message.get('content', '')}" for message in info.get("messages", ())]
    return [printable(line) for line in lines or [observation]]
