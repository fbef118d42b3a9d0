"""``ToolEnv``: a task, a list of tools and a reward make an environment."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import types
import typing
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np

from agentrl.concurrency.event_loop import attend
from agentrl.concurrency.threads import own_thread
from agentrl.envs.core import Env, require_number, task_index
from agentrl.errors import ConfigError, EnvError
from agentrl.rewards import RewardSet
from agentrl.rewards.combine import check_signatures
from agentrl.rewards.number import reward_number, summed
from agentrl.tasks.dataset import content_hash, row_id
from agentrl.tools.base import FunctionTool, Tool, ToolErrorType, ToolResult
from agentrl.tools.execution import close_tools, run_calls, start_tools, unshared
from agentrl.tools.formats import NoneParser, Parsed, Parser, clean_text, get_parser
from agentrl.types import Message, ToolCall

_INVALID_CALL = (ToolErrorType.PARSE, ToolErrorType.UNKNOWN_TOOL, ToolErrorType.INVALID_ARGUMENTS)
Transition = tuple[str, float, bool, bool, dict[str, Any]]

_ROUNDING = 1e-9
"""By so much a sum of parts may miss the reward of a success: 0.7 + 0.2 + 0.1 is less than 1 in binary."""


class ToolEnv(Env):
    """An environment in which the model calls tools until it answers without a call.

    Subclasses set ``tools`` and ``reward``, and define ``task`` or set ``tasks``. The first turn
    without a tool call is the answer and ends the episode; so does a tool that returns
    ``ToolResult(terminated=True)``.

    Example:
        >>> from agentrl import tool
        >>> @tool
        ... def add(a: int, b: int) -> str:
        ...     '''Adds two integers.
        ...
        ...     Args:
        ...         a: The first.
        ...         b: The second.
        ...     '''
        ...     return str(a + b)
        >>> class Sums(ToolEnv):
        ...     tools = [add]
        ...     def task(self, rng, split):
        ...         a, b = rng.integers(100, size=2)
        ...         return f"{a} + {b} = ?", str(a + b)
        ...     def reward(self, text, answer):
        ...         return float(text.strip() == answer)
        >>> env = Sums()
        >>> observation, info = env.reset(seed=0)
        >>> env.step('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')[0]
        '3'
    """

    tools: Sequence[Any] = ()
    """Functions, :class:`Tool` subclasses or instances. Methods marked ``@agentrl.tool`` are added."""
    tasks: Mapping[str, Sequence[Any]] | None = None
    """Rows by split: what :meth:`task` would return. None: :meth:`task` makes them."""
    reward: Any = None
    """A method ``reward(self, text, answer)``, a function, or a list of functions or (weight, function).

    Needed, unless a tool rewards: an environment in which nothing can earn a reward cannot be made.
    """
    turn_reward: Any = None
    """What each turn earns, the last one too: a method ``turn_reward(self, text, calls)``, or as ``reward``.

    ``text`` is what the model wrote beside its calls, ``calls`` are the calls of this turn (``name``, ``arguments``,
    ``error``), which have been run. Added to what tools give. Where there is a ``reward``, that alone decides on
    success.
    """
    system_prompt: str = ""
    """First message of every episode, if not empty."""

    tool_timeout: float = 30.0
    """Seconds a call may take, unless the tool says otherwise."""
    max_tool_output: int = 8000
    """Characters of a result the model gets to see; the rest is cut, with a mark."""
    max_calls: int = 16
    """Calls run in one turn; the rest are answered with an error."""
    invalid_call_reward: float = 0.0
    """Added for each malformed call, unknown tool or wrong argument; usually negative or 0."""
    success_reward: float = 1.0
    """The episode is a success when its final reward reaches this. A graded reward, such as ``f1``, almost never
    reaches 1: lower it to what counts as solved."""
    sandbox: str = "auto"
    """How tools that run the model's code do so, unless they say it themselves; as :class:`~agentrl.tools.PythonTool`
    takes it."""
    answer_tag: str = "answer"
    """In a tag format that has this tag, its text is the answer."""
    result_tag: str = "information"
    """In a tag format, the tag around results."""

    settings: ClassVar[tuple[str, ...]] = (
        *Env.settings,
        "system_prompt",
        "tool_timeout",
        "max_tool_output",
        "max_calls",
        "invalid_call_reward",
        "success_reward",
        "sandbox",
    )

    _open_tools: Sequence[Tool] = ()
    _unstarted: list[Tool]

    row: dict[str, Any]
    """The task at hand: ``prompt``, ``answer`` and whatever else the author put there."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        listed = cls.__dict__.get("tools", ())
        for entry in listed if isinstance(listed, (list, tuple)) else ():
            if inspect.isfunction(entry):
                _function_tool(entry)  # a missing description is an error here, where the class is defined

    def check_settings(self) -> None:
        super().check_settings()
        require_number(self, "tool_timeout", at_least=0)
        require_number(self, "max_tool_output", at_least=0, whole=True)
        require_number(self, "max_calls", at_least=1, whole=True)
        require_number(self, "invalid_call_reward", at_least=-1e9)
        require_number(self, "success_reward", at_least=-1e9)
        self._check_reward()

    def _made(self) -> None:
        self._check_lists()
        self._check_reward()
        for which in ("reward", "turn_reward"):
            check_signatures(self._reward_of(which))

    def listed_tools(self) -> list[Any]:
        """What :meth:`make_tools` makes the tools of, as the author wrote it."""
        self._check_lists()
        return [*self.tools, *_method_tools(type(self).__mro__)]

    def follows_template(self) -> bool:
        """Whether it has tools and leaves the form of calls to the model's chat template."""
        return self.call_format == "auto" and (
            bool(self.listed_tools()) or type(self).make_tools is not ToolEnv.make_tools
        )

    def _check_lists(self) -> None:
        """Refuses ``tools`` and ``tasks`` that are not of the form that they have."""
        name = type(self).__name__
        if not isinstance(self.tools, (list, tuple)):
            raise ConfigError(f"{name}.tools is {_brief(self.tools)}; a list is expected, as in tools = [look_up].")
        if self.tasks is not None and not isinstance(self.tasks, Mapping):
            raise ConfigError(
                f"{name}.tasks is {_brief(self.tasks)}; a dict of lists by split is expected, as in "
                "tasks = {'train': [...], 'test': [...]}."
            )

    # -- what authors define ---------------------------------------------------------------------

    def task(self, rng: np.random.Generator, split: str) -> Any:
        """Makes a task; may be ``async``.

        Args:
            rng: Seeded by split and task index, so that the same index is the same task everywhere.
            split: One of ``splits``; draw its tasks from a part of the world of its own.

        Returns:
            The prompt; or ``(prompt, answer)``; or a dict with ``prompt``, ``answer``, optionally
            ``task_id`` and ``category`` (scores are also given by category), and anything the tools or the reward
            need. A prompt is text or a list of messages.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither `task` nor `tasks`.")

    def num_tasks(self, split: str) -> int | None:
        """Number of rows in ``tasks[split]``; else of ``task_counts``; None: :meth:`task` makes them without end."""
        return super().num_tasks(split) if self.tasks is None else len(self.tasks.get(split, ()))

    def id_of_task(self, split: str, index: int) -> str | None:
        """Of a listed row its ``task_id``, else the hash of its content; None for rows that are made by number."""
        rows = self.tasks[split] if self.tasks is not None else None
        listed = isinstance(rows, (list, tuple)) or getattr(rows, "listed", False)
        return row_id(rows[index]) if rows is not None and listed else None

    def make_tools(self) -> list[Tool]:
        """The tools of one episode: fresh copies of ``tools``, then the methods marked as tools."""
        tools = [self._own(entry) for entry in self.tools]
        return tools + [method.bind(self) for method in _method_tools(type(self).__mro__)]

    def _own(self, entry: Any) -> Tool:
        """The instance of an entry of ``tools`` for this episode; :meth:`areset` starts it, if nothing has."""
        tool = _as_tool(entry)
        if tool.shared or type(tool).for_episode is not Tool.for_episode:
            return tool.for_episode(self)
        tool = tool if inspect.isclass(entry) else tool.copied()
        self._unstarted.append(tool)
        return tool

    def first_messages(self, row: dict[str, Any]) -> list[Message]:
        """The conversation an episode starts with: ``system_prompt``, then the row's prompt."""
        system = [Message(role="system", content=self.system_prompt)] if self.system_prompt else []
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return [*system, Message(role="user", content=prompt)]
        return [*system, *copy.deepcopy(list(prompt))]

    # -- the episode -----------------------------------------------------------------------------

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await self._close_tools()
        split = self.split_of(options)
        given = (options or {}).get("row")
        index = task_index(self, split, options) if given is None else content_hash(given)
        self.row = await self._task_row(split, index, given)
        self._unstarted = []
        self._tools = self._by_name(self.make_tools())
        self._open_tools = list(self._tools.values())
        await start_tools(self._unstarted, self)
        schemas = [tool.schema() for tool in self._open_tools]
        self._parser = self._choose_parser(self._options.get("call_format", "auto")).with_tools(schemas)
        self._rewards = {which: RewardSet(self._reward_of(which)) for which in ("reward", "turn_reward")}
        self._turns: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._total = 0.0
        messages = self.first_messages(self.row)
        named = self.row.get("task_id") or (self.id_of_task(split, index) if isinstance(index, int) else None)
        info: dict[str, Any] = {"task_id": str(named or f"{split}/{index}"), "messages": messages}
        if self.row.get("category") is not None:  # null in a table, where other rows have one
            info["category"] = str(self.row["category"])
        if self._tools and self._parser.structured:
            info["tools"] = schemas
        if self._parser.stop:
            info["stop"] = list(self._parser.stop)
        return _text_of(m for m in messages if m["role"] != "system"), info

    async def _task_row(self, split: str, index: int | str, given: Any) -> dict[str, Any]:
        """The row of a task, as a dict with ``prompt``. ``given``: the task itself, of ``options["row"]``."""
        name = type(self).__name__
        where = f"what {name}.task returned"
        if isinstance(index, str):
            made = given
        elif self.tasks is not None:
            made, where = self.tasks[split][index], f"{name}.tasks[{split!r}][{index}]"
        else:
            rng = np.random.default_rng([zlib.crc32(split.encode()), index])
            if inspect.iscoroutinefunction(self.task):
                made = await attend(f"{name}.task", self.task, rng, split, owner=self)
            else:
                made = await own_thread(self).run(self.task, rng, split)
        if isinstance(made, str):
            made = {"prompt": made}
        elif isinstance(made, tuple) and len(made) == 2:
            made = {"prompt": made[0], "answer": made[1]}
        if not isinstance(made, dict) or not isinstance(made.get("prompt"), (str, list)):
            raise EnvError(f"{where} must be a prompt, (prompt, answer) or a dict with 'prompt', got {made!r:.120}.")
        return dict(made)

    async def astep(self, action: str) -> Transition:
        parsed = self._parser.read(action)
        self._turns.append(action)
        calls, answer = self._calls_and_answer(parsed)
        if answer is not None:
            return await self._finish(answer, await self._judged("turn_reward", answer, []), [], [])
        results = await run_calls(calls, self._tools, timeout=self.tool_timeout, max_calls=self.max_calls)
        records = [_record(c, r) for c, r in zip(calls, results, strict=True)]
        self._calls += map(dict, records)  # wrappers may edit those in ``info``
        judged = bool(self._rewards["turn_reward"].parts)
        parts = await self._judged("turn_reward", parsed.content, records) if judged else {}
        if earned := self._earned_by_calls(calls, results):
            parts["tools"] = parts.get("tools", 0.0) + earned
        messages = self._observe(calls, results)
        if any([r.terminated for r in results]):
            return await self._finish(parsed.content, parts, messages, records)
        reward = math.fsum(parts.values())
        self._total += reward
        info: dict[str, Any] = {"messages": messages, "tool_calls": records}
        if parts:
            info["rewards"] = parts
        return _text_of(messages), reward, False, False, info

    async def aclose(self) -> None:
        await self._close_tools()

    async def _close_tools(self) -> None:
        opened, self._open_tools = self._open_tools, []
        await close_tools(opened)

    async def _finish(
        self, text: str, parts: dict[str, float], messages: list[Message], records: list[dict[str, Any]]
    ) -> Transition:
        """The last transition: the final reward is of what the model wrote, never of what tools said."""
        final = await self._judged("reward", text, self._calls)
        parts = summed(parts, final)
        reward = math.fsum(parts.values())
        self._total += reward
        solved = self.is_success(final, self._total)
        info: dict[str, Any] = {"messages": messages, "rewards": parts, "success": solved}
        if records:
            info["tool_calls"] = records
        await self._close_tools()
        return _text_of(messages), reward, True, False, info

    def _earned_by_calls(self, calls: list[ToolCall], results: list[ToolResult]) -> float:
        earned = 0.0
        for call, result in zip(calls, results, strict=True):
            if type(result.reward) is not float or result.reward != 0.0:
                earned += reward_number(result.reward, f"the reward of tool {call.name!r}")
            if result.error is not None and result.error.type in _INVALID_CALL:
                earned += self.invalid_call_reward
        return earned

    def _by_name(self, tools: Sequence[Tool]) -> dict[str, Tool]:
        by_name = {tool.name: tool for tool in tools}
        if len(by_name) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{type(self).__name__} has two tools named {twice!r}; give one another `name`.")
        return by_name

    # -- calls -----------------------------------------------------------------------------------

    def _choose_parser(self, models: str) -> Parser:
        """The parser of this environment's format; where it leaves that open, of the model's."""
        name = models if self.call_format == "auto" else self.call_format
        if name == "auto":
            name = "hermes" if self._tools else "none"
        parser = get_parser(name)
        tags = getattr(parser, "names", None)
        if tags is not None:
            without = [tag for tag in tags if tag not in self._tools and tag != self.answer_tag]
            if without:
                raise ConfigError(
                    f"call format {name!r}: no tool is named {without[0]!r}; there are: {', '.join(self._tools)}."
                )
        elif self._tools and isinstance(parser, NoneParser):
            raise ConfigError(
                f"{type(self).__name__} has tools, but its call format is {name!r}: the model's chat template takes no "
                "tools, or in a way that is not known here. Use a model of a known family, set call_format to one of "
                "theirs, or declare call_format = 'tags:<tool>,answer' and explain the tags in the prompt."
            )
        return parser

    def _calls_and_answer(self, parsed: Parsed) -> tuple[list[ToolCall], str | None]:
        """The calls to run, and the answer if the turn is one."""
        tags = getattr(self._parser, "names", ())
        calls = list(parsed.tool_calls)
        if self.answer_tag not in tags:
            return calls if self._parser.structured else self._tag_arguments(calls), None if calls else parsed.content
        # What follows an answer does not count, and an answer beside a call was given without its result.
        position = next((i for i, c in enumerate(calls) if c.name == self.answer_tag and c.error is None), None)
        if position == 0:
            return [], calls[0].arguments["text"]
        calls = calls[:position]
        if not calls:
            calls = [ToolCall("", {}, "call_0", "no tag found")]
        return self._tag_arguments(calls), None

    def _tag_arguments(self, calls: list[ToolCall]) -> list[ToolCall]:
        """In a tag format, the text goes to the tool's first parameter."""
        named = []
        for call in calls:
            tool = self._tools.get(call.name)
            first = next(iter(tool.parameters.get("properties", {})), "text") if tool else "text"
            arguments = {first: call.arguments["text"]} if "text" in call.arguments else {}
            named.append(ToolCall(call.name, arguments, call.id, call.error))
        return named

    def _observe(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        if self._parser.structured:
            return [
                Message(role="tool", name=call.name, content=self._shown(result), tool_call_id=call.id)
                for call, result in zip(calls, results, strict=True)
            ]
        tags = "|".join(map(re.escape, (*getattr(self._parser, "names", ()), self.result_tag, "think")))
        forged = re.compile(rf"<(/?)({tags})>", re.IGNORECASE)
        parts = []
        for result in results:
            text = self._shown(result)
            if result.error is None or result.error.type is not ToolErrorType.PARSE:  # whose words name the tags
                text = forged.sub(r"[\1\2]", text)
            parts.append(text if result.error else f"<{self.result_tag}>\n{text}\n</{self.result_tag}>")
        return [Message(role="user", content="\n".join(parts))]

    def _shown(self, result: ToolResult) -> str:
        text = clean_text(result.observation or (str(result.error) if result.error else ""))
        if result.error is not None and result.error.type is ToolErrorType.PARSE and self._parser.hint:
            text = f"{text}. {self._parser.hint}"
        cut = len(text) - self.max_tool_output
        return text if cut <= 0 else f"{text[: self.max_tool_output]}\n[{cut} more characters cut]"

    # -- rewards ---------------------------------------------------------------------------------

    def is_success(self, final: Mapping[str, float], total: float) -> bool:
        """Whether an episode that came to its end is a success.

        Args:
            final: Parts of the final reward; empty where the environment has none.
            total: All that the episode earned, which is judged then.
        """
        judged = math.fsum(final.values()) if final else total
        return judged >= self.success_reward - _ROUNDING

    async def judge_again(
        self, turns: Sequence[str], calls: Sequence[Sequence[Mapping[str, Any]]], *, finished: bool
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """What ``turn_reward`` and ``reward`` give for turns that were taken before. No tool is called.

        Args:
            turns: What the model wrote, in the task that this environment was reset to.
            calls: For each turn, the records of its calls (``info["tool_calls"]``).
            finished: Whether the last turn ended the episode, so that the final reward is due.

        Returns:
            Parts by name: those of each turn, and those of the end.
        """
        of_turns, said = [], ""
        for text, records in zip(turns, calls, strict=True):
            self._turns.append(text)
            self._calls.extend(dict(record) for record in records)
            parsed = self._parser.parse(text)
            _, answer = self._calls_and_answer(parsed)
            said = parsed.content if answer is None else answer
            of_turns.append(await self._judged("turn_reward", said, records))
        return of_turns, await self._judged("reward", said, self._calls) if finished and turns else {}

    async def _judged(self, which: str, text: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Parts of the reward ``which``. It gets the model's own part of the records, nothing that a tool said."""
        if not (rewards := self._rewards[which]).parts:
            return {}
        calls = [copy.deepcopy({k: r[k] for k in ("name", "arguments", "error") if k in r}) for r in records]
        return await rewards(text, self.row.get("answer"), turns=list(self._turns), calls=calls, row=self.row)

    def _reward_of(self, which: str) -> Any:
        """The ``reward`` or ``turn_reward`` as its author wrote it: a method bound, a plain function as it is."""
        if which in vars(self):
            return vars(self)[which]
        owner = next(cls for cls in type(self).__mro__ if which in vars(cls))
        value = vars(owner)[which]
        if inspect.isfunction(value):
            return value.__get__(self) if _is_method(value, owner) else value
        return getattr(self, which) if hasattr(value, "__get__") else value  # static and class methods

    def _check_reward(self) -> None:
        """Refuses an environment in which nothing can ever earn a reward."""
        for reward in (self._reward_of("reward"), self._reward_of("turn_reward")):
            if reward is not None and not (isinstance(reward, (list, tuple)) and not reward):
                return
        own = type(self).__mro__[: type(self).__mro__.index(ToolEnv)]
        judges_itself = any(name in vars(cls) for cls in own for name in ("step", "astep", "make_tools"))
        if self.invalid_call_reward or judges_itself or any(map(_may_reward, self.listed_tools())):
            return
        name = type(self).__name__
        raise ConfigError(
            f"{name} has no reward, so every episode would be worth 0. Define `def reward(self, text, answer)` in it, "
            "set `reward` to a function or a name (exact_match, f1, math), define `turn_reward`, or let a tool return "
            "`agentrl.ToolResult(text, reward=...)` and declare that it does: `-> agentrl.ToolResult`."
        )


def check_machine(env: gymnasium.Env[Any, Any]) -> None:
    """Raises ConfigError where this machine lacks what a tool of ``env`` needs; nothing else of it is run."""
    if isinstance(env.unwrapped, ToolEnv):
        for entry in env.unwrapped.tools:
            _as_tool(entry).check(env.unwrapped)


def prepare_tools(env: gymnasium.Env[Any, Any]) -> None:
    """Have what the first calls of the tools of ``env`` would wait for: an index, say."""
    if isinstance(env.unwrapped, ToolEnv):
        for entry in env.unwrapped.tools:
            _as_tool(entry).prepare()


def _brief(value: Any) -> str:
    text = getattr(value, "name", None) if isinstance(value, Tool) else repr(value)
    return f"{text!s:.60} ({type(value).__name__})"


def _as_tool(entry: Any) -> Tool:
    if isinstance(entry, Tool):
        return entry
    if inspect.isclass(entry) and issubclass(entry, Tool):
        return entry()
    if callable(entry):
        return _function_tool(entry)
    raise TypeError(f"a tool is a function, a Tool or a subclass of Tool, got {entry!r}.")


@functools.lru_cache(maxsize=256)
def _function_tool(function: Any) -> FunctionTool:
    return FunctionTool(function)


@functools.lru_cache(maxsize=256)
def _method_tools(mro: tuple[type, ...]) -> tuple[FunctionTool, ...]:
    found: dict[str, FunctionTool] = {}
    for owner in reversed(mro):
        for name, value in vars(owner).items():
            if isinstance(value, FunctionTool) and value.is_method:
                found[name] = value
            else:
                found.pop(name, None)
    return tuple(found.values())


def _record(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    record: dict[str, Any] = {"name": call.name, "arguments": dict(unshared(call.arguments))}
    if result.error is not None:
        record["error"] = str(result.error.type)
    if result.metadata:
        record["metadata"] = copy.deepcopy(result.metadata)
    return record


def _text_of(messages: Any) -> str:
    return "\n".join([str(message.get("content", "")) for message in messages])


@functools.lru_cache(maxsize=256)
def _is_method(function: types.FunctionType, owner: type) -> bool:
    """Whether ``function`` was defined in the body of ``owner``, not merely put there."""
    first = next(iter(inspect.signature(function).parameters), "")
    place, _, name = function.__qualname__.rpartition(".")
    defined_there = (function.__module__, place) == (owner.__module__, owner.__qualname__) and name != "<lambda>"
    return first == "self" or (defined_there and first != "text")


def _may_reward(tool: Any) -> bool:
    """Whether a tool could return a :class:`ToolResult`: it says so, or does not say what it returns."""
    if isinstance(tool, FunctionTool):
        tool = tool.function
    elif not inspect.isroutine(tool):
        tool = (tool if inspect.isclass(tool) else type(tool)).__call__
    try:
        hint = typing.get_type_hints(tool).get("return", Any)
    except Exception:  # a name that is not defined here: nothing is known
        return True
    kinds = (hint, *typing.get_args(hint))
    return any(kind in (Any, object) or (inspect.isclass(kind) and issubclass(kind, ToolResult)) for kind in kinds)
