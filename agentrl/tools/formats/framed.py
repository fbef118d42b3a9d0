"""Calls between the tokens of a family: what the formats of ``families.py`` and its neighbours share.

A call is read where its opening token stands, from left to right, and each by itself: a broken call becomes an error
that names what is wrong, while its neighbours still run. On what the published templates write, the calls are those
that SGLang's own detectors read (a test compares them); there a broken call disappears, or takes others with it.
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.tools.formats.base import MAX_CALLS, Parsed, Parser, Read
from agentrl.tools.formats.strict_json import Malformed, json_call, kind, read_arguments, read_json, short_name
from agentrl.tools.formats.typed import typed
from agentrl.types import ToolCall

MAX_ARGUMENTS = 256
"""Arguments of one call in a format that writes them as tags."""
NOT_TEXT = ["boolean", "integer", "number", "array", "object", "null"]
"""The types of JSON that a family writes in another way than text."""


class FramedParser(Parser):
    """A format whose calls begin with a token."""

    opening: ClassVar[str]
    closing: ClassVar[str]
    section: ClassVar[tuple[str, str] | None] = None
    """Tokens around all calls of a turn, where the family has them."""
    inner: ClassVar[tuple[str, ...]] = ()
    """Tokens that only ever stand inside a call."""
    bare: ClassVar[re.Pattern[str] | None] = None
    """What a call without opening token starts with, at the start of what is said."""
    schemas: dict[str, Any]
    """Parameters of each tool, by its name."""

    def __init__(self) -> None:
        self.schemas = {}

    def with_tools(self, schemas: Sequence[dict[str, Any]]) -> Parser:
        """A parser that types arguments as these schemas do."""
        parser = copy.copy(self)
        functions = [schema.get("function", schema) for schema in schemas]
        parser.schemas = {function["name"]: _mapping(function.get("parameters")) for function in functions}
        return parser

    def reads_as(self, other: Parser) -> bool:
        return self.name == other.name and self.schemas == getattr(other, "schemas", None)

    def parse(self, text: str) -> Parsed:
        return self._checked(self._scan(self.plain(text), {self.opening: ""}, self.bare))

    def _checked(self, parsed: Parsed) -> Parsed:
        """Without the tokens of the section; a token of the format that is part of no call is an error."""
        content = parsed.content
        if not parsed.tool_calls:
            stray = next((t for t in (*(self.section or ()), self.closing, *self.inner) if t and t in content), None)
            if stray is None:
                return parsed
            return self._stray(parsed, f"{stray} without a call: a call begins with {self.opening}")
        for token in self.section or ():
            content = content.replace(token, "")
        return Parsed(content.strip(), parsed.reasoning, parsed.tool_calls)

    def _look_around(self, text: str, start: int, close: int) -> None:
        if close < 0:
            raise Malformed(f"{self.opening} is not closed by {self.closing}")
        if self.opening in text[start:close]:
            raise Malformed(f"{self.opening} inside a call that is not closed by {self.closing}")
        self._check_section(text, start)

    def _check_section(self, text: str, start: int) -> None:
        if self.section is not None and self.section[0] not in text[:start]:
            raise Malformed(f"a call must stand between {self.section[0]} and {self.section[1]}")


class EnclosedParser(FramedParser):
    """A family that closes each call by a token: what stands between the tokens is one call, or a list of calls."""

    @abstractmethod
    def _calls(self, body: str, number: int) -> list[ToolCall]:
        """The calls between :attr:`opening` and :attr:`closing`. Raises Malformed: they have not the family's form."""

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read | None:
        close = text.find(self.closing, start)
        after = close + len(self.closing) if close >= 0 else len(text)
        try:
            self._look_around(text, start, close)
            return self._calls(text[start:close], number), after
        except Malformed as problem:
            return [self._error(problem, number)], after


class TaggedParser(FramedParser):
    """A family that writes a call as a name, and then each argument as a key and a value between tags."""

    head: ClassVar[re.Pattern[str]]
    """What follows the opening token: the tool's ``name``."""
    argument: ClassVar[re.Pattern[str]]
    """What stands before a value: its ``key``, and a group ``text`` where the model says itself whether it is text."""
    value_end: ClassVar[str]
    tail: ClassVar[re.Pattern[str]]
    """What follows the last value, the closing token included."""
    form: ClassVar[str]
    """How a call is written, for errors and the hint."""
    lines: ClassVar[bool] = False
    """Whether a value stands on lines of its own."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        begin, end = cls.section or (cls.opening, cls.closing)
        if "hint" not in vars(cls):
            cls.hint = f"Between {begin} and {end} write {cls.form}."

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read | None:
        try:
            return self._call(text, start, number)
        except Malformed as problem:
            error = self._error(problem, number)
        close = text.find(self.closing, start)
        try:
            self._look_around(text, start, close)
        except Malformed as problem:  # the cause rather than what came of it
            error = self._error(problem, number)
        return [error], close + len(self.closing) if close >= 0 else len(text)

    def _call(self, text: str, start: int, number: int) -> Read:
        self._check_section(text, start)
        head = self.head.match(text, start)
        if head is None:
            raise Malformed(f"a call is {self.form}")
        name = self._text_of(head["name"])
        schema = self.schemas.get(name, {})
        properties = _mapping(schema.get("properties"))
        arguments: dict[str, Any] = {}
        at = head.end()
        while (found := self.argument.match(text, at)) is not None:
            key = self._text_of(found["key"])
            if key in arguments:
                raise Malformed(f"argument {key[:40]!r} is given twice")
            if len(arguments) == MAX_ARGUMENTS:
                raise Malformed(f"more than {MAX_ARGUMENTS} arguments")
            end = text.find(self.value_end, found.end())
            value = text[found.end() : end if end >= 0 else len(text)]
            if end < 0 or (self.closing in value and self.opening in value):  # it went on into the next call
                raise Malformed(f"a value is not closed by {self.value_end}: a call is {self.form}")
            if self.lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = self._value(value, found, properties.get(key), schema)
            at = end + len(self.value_end)
        tail = self.tail.match(text, at)
        if tail is None:
            raise Malformed(f"a call is {self.form}")
        return [ToolCall(short_name(name), read_arguments(arguments), self.call_id(number))], tail.end()

    def _value(self, text: str, found: re.Match[str], schema: Any, root: Any) -> Any:
        said = found.groupdict()
        if said.get("text"):
            return text
        return typed(text, {"type": NOT_TEXT} if "text" in said and schema is None else schema, root)

    def _text_of(self, written: str) -> str:
        """A name or key as it is meant."""
        return written.strip()


class JsonListParser(EnclosedParser):
    """A family that writes all calls of a turn as a JSON list of objects with ``name`` and ``arguments``."""

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        value, end = read_json(body)
        if body[end:].strip():
            raise Malformed(f"text after the list of calls: {self.closing} must follow it")
        return self._listed(value, number)

    def _listed(self, value: Any, number: int) -> list[ToolCall]:
        if not isinstance(value, list):
            raise Malformed(f"{self.opening} must be followed by a JSON list of calls")
        if not value:
            raise Malformed("the list of calls is empty")
        return [self._element(item, number + i) for i, item in enumerate(value[: MAX_CALLS + 1])]

    def _element(self, item: Any, number: int) -> ToolCall:
        try:
            call = json_call(item)
            call.id = self._given_id(item.get("id"), number)
            return call
        except Malformed as problem:
            return self._error(problem, number)

    def _given_id(self, call_id: Any, number: int) -> str:
        return self.call_id(number)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def json_arguments(text: str) -> dict[str, Any]:
    """The one JSON object in ``text``. Raises Malformed: there is something else."""
    value, end = read_json(text)
    if text[end:].strip():
        raise Malformed("text after the arguments: write one JSON object in each call")
    if not isinstance(value, dict):
        raise Malformed(f"the arguments must be a JSON object, got {kind(value)}")
    return read_arguments(value)
