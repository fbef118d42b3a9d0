"""Calls as SGLang's own detectors read them, one call at a time.

What SGLang serves and what is trained should agree on what a call is, so the reading is SGLang's
(``sglang.srt.function_call``). Around it stands what a training loop needs and a server does not: each call is
cut out of the turn, looked over and handed over by itself, so that a broken call becomes an error that
names what is wrong, while its neighbours still run. (The detectors drop what they cannot read, drop unknown
tools, and some of their expressions take quadratic time on text that no template ever wrote.)

Importing SGLang imports torch and takes seconds, so it happens when a parser first needs it.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from agentrl.errors import ConfigError
from agentrl.tools.parsers.base import Parsed, Parser, Read
from agentrl.tools.parsers.strict_json import Malformed, clean_text, read_arguments, read_json, short_name
from agentrl.types import ToolCall
from agentrl.versions import install_command

_loading = threading.Lock()


@dataclass(frozen=True)
class Draft:
    """A call that has the form of its family.

    ``text`` is a whole turn with this call alone, as the family's template writes it; ``name`` is None where only
    the tools' schemas tell which tool is meant; ``id`` is the one that the model gave the call.
    """

    name: str | None
    text: str
    id: str | None = None


class DetectorParser(Parser):
    """A family's format: framed here, read by the family's detector in SGLang.

    Subclasses find each call in the text and turn it into a :class:`Draft`.
    """

    detector: ClassVar[tuple[str, str]]
    """Module in ``sglang.srt.function_call`` and class."""
    opening: ClassVar[str]
    closing: ClassVar[str]
    section: ClassVar[tuple[str, str] | None] = None
    """Tokens around all calls of a turn, where the family has them."""
    inner: ClassVar[tuple[str, ...]] = ()
    """Tokens that only ever stand inside a call."""

    def __init__(self) -> None:
        self._schemas = "[]"
        self._names: frozenset[str] = frozenset()

    def with_tools(self, schemas: Sequence[dict[str, Any]]) -> Parser:
        """A parser that types arguments as these schemas do; loads SGLang.

        Raises:
            ConfigError: SGLang cannot be imported, or a schema is not one that it takes.
        """
        if not schemas:
            return self
        parser = copy.copy(self)
        parser._schemas = json.dumps(list(schemas), sort_keys=True)
        parser._names = frozenset(_function(schema)["name"] for schema in schemas)
        _detector(*self.detector, self.name)
        _tools(parser._schemas, self.name)
        return parser

    def parse(self, text: str) -> Parsed:
        """See :class:`Parser`.

        Raises:
            ConfigError: there is a call, :meth:`with_tools` was not called, and SGLang cannot be imported.
        """
        return self._checked(self._scan(text, {self.opening: ""}))

    def _checked(self, parsed: Parsed) -> Parsed:
        """Without the tokens of the section; a token of the format that is part of no call is an error."""
        content = parsed.content
        if not parsed.tool_calls:
            stray = next((t for t in (*(self.section or ()), self.closing, *self.inner) if t and t in content), None)
            if stray is None:
                return parsed
            error = f"{stray} without a call: a call begins with {self.opening}"
            return Parsed(content, parsed.reasoning, [ToolCall("", {}, self.call_id(0), error)], [error])
        for token in self.section or ():
            content = content.replace(token, "")
        return Parsed(content.strip(), parsed.reasoning, parsed.tool_calls, parsed.errors)

    def _detected(self, draft: Draft, number: int) -> ToolCall:
        """The call as the family's detector reads it; an error where it reads none."""
        call_id = draft.id or self.call_id(number)
        detector, tools = _detector(*self.detector, self.name)(), _tools(self._schemas, self.name)
        if draft.name is not None and draft.name not in self._names:
            # A detector drops calls of tools that it was not given; the model should be told that there is none.
            tools = [*tools, _tool({"name": draft.name}, self.name)]
        name = short_name(draft.name or "")
        try:
            found = detector.detect_and_parse(draft.text, tools).calls
        except Exception as problem:  # another project's code on a model's text
            return ToolCall(name, {}, call_id, f"the call cannot be read: {clean_text(str(problem))[:120]}")
        if len(found) != 1 or not found[0].name:
            return ToolCall(name, {}, call_id, "the call cannot be read")
        name = short_name(found[0].name)
        try:
            value, _ = read_json(clean_text(found[0].parameters or "{}"))
            return ToolCall(name, read_arguments(value), call_id)
        except Malformed as problem:
            return ToolCall(name, {}, call_id, str(problem))


class EnclosedParser(DetectorParser):
    """A family that closes each call by a token: what stands between the tokens is one call."""

    @abstractmethod
    def _draft(self, body: str) -> Draft:
        """The call between :attr:`opening` and :attr:`closing`.

        Raises:
            Malformed: it has not the family's form.
        """

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read | None:
        close = text.find(self.closing, start)
        body = text[start : close if close >= 0 else len(text)]
        after = close + len(self.closing) if close >= 0 else len(text)
        try:
            if close < 0:
                raise Malformed(f"{self.opening} is not closed by {self.closing}")
            if self.opening in body:
                raise Malformed(f"{self.opening} inside a call that is not closed by {self.closing}")
            if self.section is not None and self.section[0] not in text[:start]:
                raise Malformed(f"a call must stand between {self.section[0]} and {self.section[1]}")
            return [self._detected(self._draft(body), number)], after
        except Malformed as problem:
            return [ToolCall("", {}, self.call_id(number), str(problem))], after


def _function(schema: dict[str, Any]) -> dict[str, Any]:
    return schema.get("function", schema)


@lru_cache(maxsize=64)
def _detector(module: str, name: str, call_format: str) -> Any:
    return getattr(_import(f"sglang.srt.function_call.{module}", call_format), name)


@lru_cache(maxsize=64)
def _tools(schemas: str, call_format: str) -> list[Any]:
    return [_tool(_function(schema), call_format) for schema in json.loads(schemas)]


def _tool(function: dict[str, Any], call_format: str) -> Any:
    protocol = _import("sglang.srt.entrypoints.openai.protocol", call_format)
    try:
        return protocol.Tool(type="function", function=function)
    except ValueError as error:  # pydantic's ValidationError is one
        raise ConfigError(
            f"call format {call_format!r}: SGLang refuses the schema {function!r:.200}: {error}"
        ) from error


def _import(module: str, call_format: str) -> Any:
    with _loading:
        # What a detector cannot read is reported to the model, not to the log of the machine.
        logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"calls in the format {call_format!r} are read by SGLang's parsers, and {module} cannot be imported "
                f"({error}). Install SGLang: {install_command('gpu')}, or make venv without a GPU; or choose "
                "call_format 'hermes' or 'tags:<tool>,answer', which need nothing"
            ) from error
