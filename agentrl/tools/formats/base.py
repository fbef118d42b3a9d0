"""What all call parsers share: the parsed turn, and one pass over reasoning blocks and calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from agentrl.tools.formats.strict_json import clean_text
from agentrl.types import Message, ToolCall

MAX_CALLS = 64
"""Calls read from one turn; more are refused unread, so that no text is slow to parse."""
_OPEN, _CLOSE = "<think>", "</think>"
_CALL_IDS = [f"call_{number}" for number in range(2 * MAX_CALLS)]  # shared by all trajectories that are held


@dataclass(slots=True)
class Parsed:
    """One model turn, taken apart.

    ``content`` is the text outside reasoning and well-formed calls, ``tool_calls`` the calls in order
    (a malformed one has ``error`` set). In a format that is not ``structured`` the calls are part of the content,
    and the chat template knows nothing of them.
    """

    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    structured: bool = True

    @property
    def errors(self) -> list[str]:
        """What was wrong with calls, in words."""
        return [call.error for call in self.tool_calls if call.error is not None]

    def message(self) -> Message:
        """The turn as an assistant message, as chat templates take it."""
        message = Message(role="assistant", content=self.content)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls: list[dict[str, Any]] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.tool_calls
            if c.error is None and self.structured
        ]
        if calls:
            message["tool_calls"] = calls
        return message


Read = tuple[list[ToolCall], int]


class Action(str):
    """The text of a turn, with its parse: what an episode steps an environment with.

    To everything else it is text. Edited, copied or stored, it is plain text, and is parsed anew where that is asked
    for (:meth:`Parser.read`).

    Example:
        >>> from agentrl.tools.formats import get_parser
        >>> action = Action('<tool_call>{"name": "look", "arguments": {}}</tool_call>', get_parser("hermes"))
        >>> action.calls[0].name, type(action.strip()).__name__
        ('look', 'str')
    """

    __slots__ = ("parsed", "parser")
    parsed: Parsed
    parser: Parser

    def __new__(cls, text: str, parser: Parser) -> Action:
        action = super().__new__(cls, text)
        action.parser, action.parsed = parser, parser.parse(text)
        return action

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of the turn, in order; a malformed one has ``error`` set."""
        return self.parsed.tool_calls

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)


FORMATS: dict[str, type[Parser]] = {}
"""The parsers of calls that chat templates render, by name: every subclass with a ``name``."""


class Parser(ABC):
    """Takes model turns apart. Stateless."""

    name: str = ""
    stop: tuple[str, ...] = ()
    """Strings after which the engine may stop, the turn being complete."""
    ends: ClassVar[tuple[str, ...]] = ()
    """Control tokens that end a turn with calls; not every checkpoint declares them."""
    structured: bool = True
    """Whether the chat template renders calls and results of this format."""
    hint: str = ""
    """How a call is written, for a model that got it wrong."""
    reasoning_tags: ClassVar[Mapping[str, str]] = {_OPEN: _CLOSE}
    """Opening and closing tags of what is thought, all that the family has: nothing in between is a call."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls) and cls.structured:
            FORMATS[cls.name] = cls

    @abstractmethod
    def parse(self, text: str) -> Parsed:
        """Takes one turn apart. Never raises on a ``str``."""

    def read(self, text: str) -> Parsed:
        """The parse that ``text`` carries, where it is an :class:`Action` of this format; else :meth:`parse`'s."""
        if isinstance(text, Action) and (text.parser is self or self.reads_as(text.parser)):
            return text.parsed
        return self.parse(text)

    def reads_as(self, other: Parser) -> bool:
        """Whether ``other`` takes every turn apart as this parser does."""
        return self.name == other.name

    def plain(self, text: str) -> str:
        """The turn with what was thought between ``<think>`` tags, as environments and rewards get it, whatever marks
        the family has for its reasoning and its answer. Calls stay as they were written.
        """
        for opening, closing in self.reasoning_tags.items():
            if opening != _OPEN:
                text = text.replace(opening, _OPEN).replace(closing, _CLOSE)
        return text

    def with_tools(self, schemas: Sequence[dict[str, Any]]) -> Parser:
        """The parser for an episode with these tools (OpenAI form); most formats need not know them."""
        return self

    def call_id(self, number: int) -> str:
        """Id of the turn's call ``number``, from 0, where the model writes none."""
        return _CALL_IDS[number]

    def _scan(self, text: str, openings: Mapping[str, str], bare: re.Pattern[str] | None = None) -> Parsed:
        """One pass from left to right over reasoning blocks and calls. ``openings``: opening tag of a call to its name.
        ``bare``: what a call without one starts with, at the start of what is said."""
        if not text.isascii():
            text = clean_text(text)
        pattern = _any_of((_OPEN, _CLOSE, *openings))
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        head = position = _end_of_head(text) if _CLOSE in text else 0
        said = False  # whether anything but white space was
        while True:
            if bare and not said and (start := bare.match(text, position)):
                said = True
                read = self._read_calls(text, start.end(), "", 0)
                if read is not None:
                    calls, position = self._noted(read, text, start.end(), content, calls)
                    continue
            match = pattern.search(text, position)
            if match is None or len(calls) > MAX_CALLS:
                break
            before, tag = text[position : match.start()], match.group()
            content.append(before)
            said = said or not (not before or before.isspace())
            position = match.end()
            if tag == _CLOSE:
                # Closes a block that was opened inside what looked like a call.
                head, content, thoughts, calls, said = position, [], [], [], False
            elif tag == _OPEN:
                end = text.find(_CLOSE, position)
                thoughts.append(text[position : end if end >= 0 else len(text)])
                position = end + len(_CLOSE) if end >= 0 else len(text)
            elif len(calls) == MAX_CALLS:
                calls = [*calls, self._too_many()]
                position = match.start()
            else:
                said = True
                read = self._read_calls(text, position, openings[tag], len(calls))
                assert read is not None  # a tag opened it
                calls, position = self._noted(read, text, match.start(), content, calls)
        content.append(text[position:])
        if head:
            thoughts.insert(0, text[:head].replace(_OPEN, "").replace(_CLOSE, ""))
        reasoning = "\n".join([part.strip() for part in thoughts]).strip() if thoughts else ""
        return Parsed("".join(content).strip(), reasoning, calls, self.structured)

    def _noted(
        self, read: Read, text: str, start: int, content: list[str], calls: list[ToolCall]
    ) -> tuple[list[ToolCall], int]:
        """The calls so far with those just read; what stays text to the template joins the content."""
        found, end = read
        if not self.structured or all([call.error is not None for call in found]):
            content.append(text[start:end])
        calls = calls + found
        return (calls if len(calls) <= MAX_CALLS else [*calls[:MAX_CALLS], self._too_many()]), end

    def _too_many(self) -> ToolCall:
        return self._error(f"more than {MAX_CALLS} calls in one turn", MAX_CALLS)

    def _error(self, problem: Exception | str, number: int, name: str = "") -> ToolCall:
        """The turn's call ``number``, of which nothing but this can be said."""
        return ToolCall(name, {}, self.call_id(number), str(problem))

    def _stray(self, parsed: Parsed, error: str) -> Parsed:
        """A turn without calls in which a part of one stands."""
        return Parsed(parsed.content, parsed.reasoning, [self._error(error, 0)], self.structured)

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read | None:
        """The calls whose opening tag ends at ``start`` (``number`` calls before them), and the position after
        them. None: what a bare call could start with is none.
        """
        raise NotImplementedError


@lru_cache(maxsize=256)
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def _end_of_head(text: str) -> int:
    """Where the text begins that is not the rest of a reasoning block opened in the prompt.

    Some templates write ``<think>`` themselves, so a turn may start inside the block: whatever stands
    before a ``</think>`` that nothing opened was thought, calls included.
    """
    end, is_open = 0, False
    for match in _any_of((_OPEN, _CLOSE)).finditer(text):
        if match.group() == _OPEN:
            is_open = True
        elif is_open:
            is_open = False
        else:
            end = match.end()
    return end


class NoneParser(Parser):
    """No calls: the turn is content and reasoning."""

    name = "none"
    structured = False

    def parse(self, text: str) -> Parsed:
        return self._scan(text, {})
