"""Call parsers: from what the model wrote to calls, reasoning and content.

A parser never raises on model text. A malformed call becomes a :class:`~agentrl.types.ToolCall` whose
``error`` says what is wrong. Nothing inside a reasoning block is a call.

Formats:
    ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen2.5, Qwen3, Hermes).
    ``tags:search,answer``: ``<search>text</search>``, the names declared by the environment.
    ``none``: no calls.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ConfigError
from agentrl.types import Message, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_CALLS = 64
"""Calls read from one turn; more are refused unread, so that no text is slow to parse."""
MAX_DEPTH = 64
"""Nesting of lists and objects in arguments."""


@dataclass(frozen=True)
class Parsed:
    """One model turn, taken apart.

    ``content`` is the text outside reasoning and well-formed calls, ``tool_calls`` the calls in order
    (a malformed one has ``error`` set), ``errors`` what was wrong, in words. In a format that is not
    ``structured`` the calls are part of the content, and the chat template knows nothing of them.
    """

    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    structured: bool = True

    def message(self) -> Message:
        """The turn as an assistant message, as chat templates take it."""
        message = Message(role="assistant", content=self.content)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.tool_calls
            if c.error is None and self.structured
        ]
        if calls:
            message["tool_calls"] = calls
        return message


class Parser(ABC):
    """Takes model turns apart. Stateless."""

    name: str = ""
    stop: tuple[str, ...] = ()
    """Strings after which the engine may stop, the turn being complete."""
    structured: bool = True
    """Whether the chat template renders calls and results of this format."""
    hint: str = ""
    """How a call is written, for a model that got it wrong."""

    @abstractmethod
    def parse(self, text: str) -> Parsed:
        """Takes one turn apart. Never raises on a ``str``."""

    def _scan(self, text: str, openings: dict[str, str]) -> Parsed:
        """One pass from left to right over reasoning blocks and calls.

        Args:
            text: The turn.
            openings: Opening tag of a call to its name.
        """
        text = clean_text(text)
        pattern = re.compile("|".join(re.escape(t) for t in (THINK_OPEN, THINK_CLOSE, *openings)))
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        head = position = _end_of_head(text)
        while match := pattern.search(text, position):
            content.append(text[position : match.start()])
            tag, position = match.group(), match.end()
            if tag == THINK_CLOSE:
                # Closes a block that was opened inside what looked like a call.
                head, content, thoughts, calls = position, [], [], []
            elif tag == THINK_OPEN:
                end = text.find(THINK_CLOSE, position)
                thoughts.append(text[position : end if end >= 0 else len(text)])
                position = end + len(THINK_CLOSE) if end >= 0 else len(text)
            elif len(calls) == MAX_CALLS:
                calls.append(ToolCall("", {}, f"call_{MAX_CALLS}", f"more than {MAX_CALLS} calls in one turn"))
                position = match.start()
                break
            else:
                call, position = self._read_call(text, position, openings[tag], f"call_{len(calls)}")
                if call.error is not None or not self.structured:
                    content.append(text[match.start() : position])
                calls.append(call)
        content.append(text[position:])
        first = text[:head].replace(THINK_OPEN, "").replace(THINK_CLOSE, "")
        reasoning = "\n".join(part.strip() for part in (first, *thoughts)).strip()
        errors = [c.error for c in calls if c.error is not None]
        return Parsed("".join(content).strip(), reasoning, calls, errors, self.structured)

    def _read_call(self, text: str, start: int, name: str, call_id: str) -> tuple[ToolCall, int]:
        """The call whose opening tag ends at ``start``, and the position after it."""
        raise NotImplementedError


_THINK_TAG = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}")


def _end_of_head(text: str) -> int:
    """Where the text begins that is not the rest of a reasoning block opened in the prompt.

    Some templates write ``<think>`` themselves, so a turn may start inside the block: whatever stands
    before a ``</think>`` that nothing opened was thought, calls included.
    """
    end, is_open = 0, False
    for match in _THINK_TAG.finditer(text):
        if match.group() == THINK_OPEN:
            is_open = True
        elif is_open:
            is_open = False
        else:
            end = match.end()
    return end


class NoneParser(Parser):
    """No calls: the turn is content and reasoning."""

    structured = False

    def __init__(self, name: str = "none") -> None:
        self.name = name

    def parse(self, text: str) -> Parsed:
        return self._scan(text, {})


class HermesParser(Parser):
    """``<tool_call>`` with a JSON object of ``name`` and ``arguments``, any number in a turn."""

    name = "hermes"
    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    hint = 'Write {"name": "...", "arguments": {...}} between <tool_call> and </tool_call>.'

    def parse(self, text: str) -> Parsed:
        parsed = self._scan(text, {self.OPEN: ""})
        if not parsed.tool_calls and self.CLOSE in parsed.content:
            error = f"{self.CLOSE} without {self.OPEN}"
            return Parsed(parsed.content, parsed.reasoning, [ToolCall("", {}, "call_0", error)], [error])
        return parsed

    def _read_call(self, text: str, start: int, name: str, call_id: str) -> tuple[ToolCall, int]:
        try:
            value, end = _STRICT_JSON.raw_decode(text, _SPACE.match(text, start).end())
            error = None
        except (ValueError, RecursionError) as problem:
            value, end, error = None, start, f"not valid JSON: {_json_problem(problem)}"
        close = text.find(self.CLOSE, end)
        after = close + len(self.CLOSE) if close >= 0 else len(text)
        if error is None:
            if close < 0:
                error = f"{self.OPEN} is not closed by {self.CLOSE}"
            elif text[end:close].strip():
                error = "text after the JSON object: write one object in each call"
        elif close < 0:
            error = f"{error}, and {self.OPEN} is not closed by {self.CLOSE}"
        if error is not None:
            return ToolCall("", {}, call_id, error), after
        return _call_from_json(value, call_id), after


class TagParser(Parser):
    """``<name>text</name>`` for declared names; the text is the call's one argument, ``text``.

    Args:
        names: The tags, without brackets.
    """

    structured = False

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.name = "tags:" + ",".join(names)
        self.stop = tuple(f"</{name}>" for name in names)
        self.hint = "Write " + " or ".join(f"<{name}>...</{name}>" for name in names) + "."

    def parse(self, text: str) -> Parsed:
        parsed = self._scan(text, {f"<{name}>": name for name in self.names})
        if parsed.tool_calls:
            return parsed
        stray = next((tag for tag in self.stop if tag in parsed.content), None)
        if stray is None:
            return parsed
        error = f"{stray} without <{stray[2:]}"
        return Parsed(parsed.content, parsed.reasoning, [ToolCall("", {}, "call_0", error)], [error], False)

    def _read_call(self, text: str, start: int, name: str, call_id: str) -> tuple[ToolCall, int]:
        close = text.find(f"</{name}>", start)
        if close < 0:
            return ToolCall(name, {}, call_id, f"<{name}> is not closed by </{name}>"), len(text)
        body, after = text[start:close], close + len(name) + 3
        nested = next((n for n in self.names if f"<{n}>" in body), None)
        if nested is not None:
            return ToolCall(name, {}, call_id, f"<{nested}> inside <{name}>"), after
        return ToolCall(name, {"text": body.strip()}, call_id), after


_TAG_NAME = re.compile(r"[A-Za-z][\w-]*\Z")


def get_parser(name: str) -> Parser:
    """The parser of a call format.

    Args:
        name: ``hermes``, ``tags:<name>,<name>`` or ``none``. A family that :func:`detect_format` knows and
            whose calls cannot be read yet gives a parser that finds none, which suffices without tools.

    Raises:
        ConfigError: Unknown format, or tag names that cannot be tags.
    """
    if name == "hermes":
        return HermesParser()
    if name == "none" or name in {family for family, _ in _FAMILIES}:
        return NoneParser(name)
    if name.startswith("tags:"):
        names = tuple(part.strip() for part in name.removeprefix("tags:").split(","))
        reserved = [n for n in names if not _TAG_NAME.match(n) or n == "think"]
        if reserved or len(set(names)) != len(names):
            raise ConfigError(
                f"call format {name!r}: expected different tag names of letters, digits, - and _ "
                "(not 'think'), as in tags:search,answer."
            )
        return TagParser(names)
    raise ConfigError(f"unknown call format {name!r}; expected hermes, none or tags:<name>,<name>.")


_FAMILIES = (
    # (format, all of these strings are in the template), most specific first
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("deepseek", ("tool▁calls▁begin",)),
    ("kimi", ("tool_calls_section_begin",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("ipython", '"parameters"')),
)


def detect_format(chat_template: str) -> str:
    """How a model with this chat template writes calls.

    Returns:
        ``hermes``; ``none`` when the template takes no tools; or the name of another family.
    """
    for name, marks in _FAMILIES:
        if all(mark in chat_template for mark in marks):
            return name
    return "none"


# -- JSON as models write it ---------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key[:40]!r}")
        result[key] = value
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:40]} is too large")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_SPACE = re.compile(r"[ \t\r\n]*")
_STRICT_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def _json_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:120]


def _call_from_json(value: Any, call_id: str) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", {}, call_id, f"a call is a JSON object, got {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, call_id, '"name" must be the name of a tool')
    name = clean_text(name)[:128]
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        # Some models write the arguments as a string of JSON, as the OpenAI interface does.
        try:
            arguments = _STRICT_JSON.decode(arguments)
        except (ValueError, RecursionError) as problem:
            return ToolCall(name, {}, call_id, f'"arguments" is not valid JSON: {_json_problem(problem)}')
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, call_id, f'"arguments" must be a JSON object, got {_kind(arguments)}')
    try:
        return ToolCall(name, _clean(arguments), call_id)
    except ValueError as problem:
        return ToolCall(name, {}, call_id, str(problem))


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return kinds.get(type(value), "null")


def clean_text(text: str) -> str:
    """``text`` with lone surrogates replaced, so that it can be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


def _clean(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f'"arguments" are nested deeper than {MAX_DEPTH}')
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean(item, depth + 1) for key, item in value.items()}
    return value
