"""``agentrl env play NAME``: a person in the model's place."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.cli.env import PlayedOptions, message_lines, tool_lines
from agentrl.cli.main import WORDS
from agentrl.config.layers import load_options
from agentrl.config.options import Count, json_or_text
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.envs.core import Env
    from agentrl.envs.wrappers.base import Wrapper

HELP = WORDS["env"]["play"]["intro"].rpartition("\n\n")[2]


COMMANDS = ("/call", "/tools", "/help", "/quit")


@dataclass(frozen=True, kw_only=True)
class Options(PlayedOptions):
    """Play"""

    split: str | None = None
    """Task set to play from; default: the environment's first."""
    index: Count | None = None
    """Number of the task; default: drawn from the seed."""
    seed: Count = 0
    """Same seed, same task."""


def run(name: str, argv: Sequence[str]) -> int:
    """Play one episode; returns the exit code."""
    given = load_options(Options, argv)
    import agentrl

    env = agentrl.make(name, **given.arguments())
    if given.split is not None and given.split not in env.splits:
        raise ConfigError(f"--split {given.split}: {name} has {', '.join(env.splits)}.")
    options = {"split": given.split, "index": given.index}
    try:
        return play(env, seed=given.seed, options={k: v for k, v in options.items() if v is not None})
    finally:
        env.close()


def play(env: Env | Wrapper, *, seed: int, options: dict[str, Any], source: TextIO | None = None) -> int:
    """One episode with the turns of ``source`` (default: standard input); returns the exit code."""
    from agentrl.envs.multi_agent import acting_agent, agents_of, shares

    observation, info = env.reset(seed=seed, options=options)
    tools = list(info.get("tools") or ())
    print(f"task {info['task_id']}")
    print("\n".join([*tool_lines(tools), *message_lines(info, observation)]))
    interactive = (source or sys.stdin).isatty()
    print(f"\n{HELP}" if interactive else "")
    total = 0.0
    earned = dict.fromkeys(agents_of(env), 0.0) if acting_agent(env) else {}
    turns = Turns(source or sys.stdin, tools, env, interactive)
    while True:
        action = turns.next(info.get("agent"))
        if action is None:
            print(f"\nleft before the end; reward so far {_listed(earned) if earned else f'{total:g}'}")
            return 0
        actor = acting_agent(env)
        if turns.wrote_a_call or not interactive:
            print(f"[{actor or 'you'}] {action}")
        _, reward, terminated, truncated, info = env.step(action)
        over = terminated or truncated
        total += reward
        parts = shares(agents_of(env), reward, info.get("agent_rewards")) if actor else {}
        for name, share in parts.items():
            earned[name] += share
        print("\n".join(line for line in message_lines(info) if line))
        if parts and (any(parts.values()) or over):
            print(f"rewards: {_listed(parts)}")
        elif reward or over:
            named = _listed(info.get("rewards") or {})
            print(f"reward {reward:g}" + (f" ({named})" if named else ""))
        if over:
            success = "yes" if info.get("success", total > 0 and terminated) else "no"
            sums = f"total rewards: {_listed(earned)}" if earned else f"total reward: {total:g}"
            print(f"\nstop reason: {info['stop_reason']}, success: {success}, {sums}")
            return 0


def _listed(rewards: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in rewards.items())


class Turns:
    """Reads turns as a person types them."""

    def __init__(self, source: TextIO, tools: Sequence[dict[str, Any]], env: Env | Wrapper, interactive: bool) -> None:
        self._source, self._tools, self._env, self._interactive = source, tools, env, interactive
        self.wrote_a_call = False  # the last turn holds text that the person did not type

    def next(self, agent: str | None) -> str | None:
        """The next turn; None when the person leaves or the input ends."""
        self.wrote_a_call = False
        while (line := self._line(f"{agent}> " if agent else "> ")) not in (None, "/quit"):
            command = line.partition(" ")[0]
            if line == "/help":
                print(HELP)
            elif line == "/tools":
                print("\n".join(tool_lines(self._tools)) or "there are no tools")
            elif re.fullmatch(r"/\w*", command) and command != "/call":
                near = difflib.get_close_matches(command, COMMANDS, 1, cutoff=0.4)
                hint = f" Did you mean {near[0]}?" if near else ""
                print(f"there is no command {command}.{hint} To send the line as a turn, put it between two lines `.`")
            else:
                lines = [line] if line != "." else self._until_dot()
                try:
                    return "\n".join(map(self._expanded, lines))
                except ConfigError as error:
                    print(f"error: {error}")
        return None

    def _until_dot(self) -> Iterator[str]:
        while (line := self._line(". ")) is not None and line != ".":
            yield line

    def _line(self, prompt: str) -> str | None:
        if self._interactive:
            print(prompt, end="", flush=True)
        line = self._source.readline()
        return line.rstrip("\r\n") if line else None

    def _expanded(self, line: str) -> str:
        """``/call`` written as a call, any other line as it is."""
        if line.partition(" ")[0] != "/call":
            return line
        try:
            _, *words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"/call: {error}; quote values with spaces") from error
        if not words:
            raise ConfigError("/call TOOL NAME=VALUE ...: which tool? /tools lists them")
        arguments = {}
        for word in words[1:]:
            name, separator, value = word.partition("=")
            if not separator:
                raise ConfigError(f"/call: {word!r} is not NAME=VALUE")
            arguments[name] = json_or_text(value)
        self.wrote_a_call = True
        return written_call(words[0], arguments, self._env.call_format)


def written_call(name: str, arguments: dict[str, Any], call_format: str) -> str:
    """A call as the model would write it. Raises ConfigError: no call of that format can be written here."""
    if call_format.startswith("tags:"):
        return f"<{name}>{next(iter(arguments.values()), '')}</{name}>"
    if call_format in ("auto", "hermes"):
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>{call}</tool_call>"
    raise ConfigError(f"/call cannot write the format {call_format!r}; write the call as the model would")
