"""``ToolEnv``: a task, a list of tools and a reward make an environment."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agentrl.envs.core import Env, require_number
from agentrl.envs.judging import check_reward, check_reward_signatures, is_success, reward_of
from agentrl.envs.tool_tasks import task_index, task_row
from agentrl.errors import ConfigError
from agentrl.rewards import RewardSet
from agentrl.rewards.number import checked_reward
from agentrl.shared_keys import SharedKeys
from agentrl.tasks.dataset import content_hash, row_id
from agentrl.tools.base import FunctionTool, Tool, ToolErrorType, ToolResult
from agentrl.tools.execution import close_tools, run_calls, start_tools
from agentrl.tools.formats import NoneParser, Parsed, Parser, clean_text, get_parser
from agentrl.types import Message, ToolCall

_tool_message = SharedKeys()
Transition = tuple[str, float, bool, bool, dict[str, Any]]


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

    tools: ClassVar[Sequence[Any]] = ()
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
        check_reward(self)

    def _made(self) -> None:
        self._check_lists()
        check_reward(self)
        check_reward_signatures(self)

    def judges_itself(self) -> bool:
        """Whether a subclass takes the turns or makes the tools itself, and so may reward in its own way."""
        own = type(self).__mro__[: type(self).__mro__.index(ToolEnv)]
        return any(name in vars(cls) for cls in own for name in ("step", "astep", "make_tools"))

    def listed_tools(self) -> list[Any]:
        """What :meth:`make_tools` makes the tools of, as the author wrote it."""
        self._check_lists()
        return [*self.tools, *_method_tools(type(self))]

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
        """Number of rows in ``tasks[split]``; None when :meth:`task` makes them."""
        return None if self.tasks is None else len(self.tasks.get(split, ()))

    def id_of_task(self, split: str, index: int) -> str | None:
        """Of a listed row its ``task_id``, else the hash of its content; None for rows that are made by number."""
        rows = self.tasks[split] if self.tasks is not None else None
        listed = isinstance(rows, (list, tuple)) or getattr(rows, "listed", False)
        return row_id(rows[index]) if listed else None

    def make_tools(self) -> list[Tool]:
        """The tools of one episode: fresh copies of ``tools``, then the methods marked as tools."""
        tools = [self._own(entry) for entry in self.tools]
        return tools + [method.bind(self) for method in _method_tools(type(self))]

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
        self.row = await task_row(self, split, index, given)
        self._unstarted = []
        self._tools = self._by_name(self.make_tools())
        self._open_tools = list(self._tools.values())
        await start_tools(self._unstarted, self)
        schemas = [tool.schema() for tool in self._open_tools]
        self._parser = self._choose_parser().with_tools(schemas)
        self._turns: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._total = 0.0
        messages = self.first_messages(self.row)
        named = self.row.get("task_id") or (self.id_of_task(split, index) if given is None else None)
        info: dict[str, Any] = {"task_id": str(named or f"{split}/{index}"), "messages": messages}
        if self.row.get("category") is not None:  # null in a table, where other rows have one
            info["category"] = str(self.row["category"])
        if self._tools and self._parser.structured:
            info["tools"] = schemas
        if self._parser.stop:
            info["stop"] = list(self._parser.stop)
        return _text_of(m for m in messages if m["role"] != "system"), info

    async def astep(self, action: str) -> Transition:
        parsed = self._parser.parse(action)
        self._turns.append(action)
        calls, answer = self._calls_and_answer(parsed)
        if answer is not None:
            return await self._finish(answer, await self._turn_parts(answer, []), [], [])
        results = await run_calls(calls, self._tools, timeout=self.tool_timeout, max_calls=self.max_calls)
        records = [_record(c, r) for c, r in zip(calls, results, strict=True)]
        self._calls.extend(copy.deepcopy(records))
        parts = await self._turn_parts(parsed.content, records)
        if earned := self._earned_by_calls(calls, results):
            parts["tools"] = parts.get("tools", 0.0) + earned
        messages = self._observe(calls, results)
        if any(r.terminated for r in results):
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
        calls = [_seen(call) for call in self._calls]
        final = await self._rewards("reward")(
            text, self.row.get("answer"), turns=list(self._turns), calls=calls, row=self.row
        )
        for name, value in final.items():
            parts[name] = parts.get(name, 0.0) + value
        reward = math.fsum(parts.values())
        self._total += reward
        solved = is_success(self, final, self._total)
        info: dict[str, Any] = {"messages": messages, "rewards": parts, "success": solved}
        if records:
            info["tool_calls"] = records
        await self._close_tools()
        return _text_of(messages), reward, True, False, info

    async def _turn_parts(self, text: str, records: list[dict[str, Any]]) -> dict[str, float]:
        """What :attr:`turn_reward` gives this turn, by name."""
        if reward_of(self, "turn_reward") is None:
            return {}
        calls = [_seen(call) for call in records]
        return await self._rewards("turn_reward")(
            text, self.row.get("answer"), turns=list(self._turns), calls=calls, row=self.row
        )

    def _earned_by_calls(self, calls: list[ToolCall], results: list[ToolResult]) -> float:
        wrong = (ToolErrorType.PARSE, ToolErrorType.UNKNOWN_TOOL, ToolErrorType.INVALID_ARGUMENTS)
        invalid = sum(r.error is not None and r.error.type in wrong for r in results)
        given = (
            checked_reward(r.reward, f"the reward of tool {c.name!r}") for c, r in zip(calls, results, strict=True)
        )
        return sum(given) + invalid * self.invalid_call_reward

    def _by_name(self, tools: Sequence[Tool]) -> dict[str, Tool]:
        by_name = {tool.name: tool for tool in tools}
        if len(by_name) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{type(self).__name__} has two tools named {twice!r}; give one another `name`.")
        return by_name

    # -- calls -----------------------------------------------------------------------------------

    def _choose_parser(self) -> Parser:
        name = self.call_format
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
            return self._tag_arguments(calls), None if calls else parsed.content
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
        if self._parser.structured:
            return calls
        named = []
        for call in calls:
            tool = self._tools.get(call.name)
            first = next(iter(tool.parameters.get("properties", {})), "text") if tool else "text"
            arguments = {first: call.arguments["text"]} if "text" in call.arguments else {}
            named.append(ToolCall(call.name, arguments, call.id, call.error))
        return named

    def _observe(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        texts = [self._shown(result) for result in results]
        if self._parser.structured:
            return [
                _tool_message(role="tool", name=call.name, content=text, tool_call_id=call.id)
                for call, text in zip(calls, texts, strict=True)
            ]
        tags = "|".join(map(re.escape, (*getattr(self._parser, "names", ()), self.result_tag, "think")))
        forged = re.compile(rf"<(/?)({tags})>", re.IGNORECASE)
        parts = []
        for text, result in zip(texts, results, strict=True):
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

    def _rewards(self, which: str) -> RewardSet:
        """Rewards as functions; a plain function set on the class is not a method and gets no ``self``."""
        return RewardSet(reward_of(self, which))


def check_machine(env: Any) -> None:
    """Raises ConfigError where this machine lacks what a tool of ``env`` needs; nothing else of it is run."""
    if isinstance(env.unwrapped, ToolEnv):
        for entry in env.unwrapped.tools:
            _as_tool(entry).check(env.unwrapped)


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
def _method_tools(cls: type) -> tuple[FunctionTool, ...]:
    found: dict[str, FunctionTool] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            if isinstance(value, FunctionTool) and value.is_method:
                found[name] = value
            else:
                found.pop(name, None)
    return tuple(found.values())


def _record(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    record: dict[str, Any] = {"name": call.name, "arguments": copy.deepcopy(call.arguments)}
    if result.error is not None:
        record["error"] = str(result.error.type)
    if result.metadata:
        record["metadata"] = copy.deepcopy(result.metadata)
    return record


def _seen(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that is the model's own: rewards get nothing that a tool said."""
    return copy.deepcopy({k: record[k] for k in ("name", "arguments", "error") if k in record})


def _text_of(messages: Any) -> str:
    return "\n".join(str(message.get("content", "")) for message in messages)
