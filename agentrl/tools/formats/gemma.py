"""Gemma 4: JSON without quotes around keys, and with a token for the quotes around text."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from agentrl.tools.formats.framed import EnclosedParser, json_arguments
from agentrl.tools.formats.strict_json import Malformed, short_name
from agentrl.types import ToolCall

_QUOTE = '<|"|>'
_WORD = re.compile(r"[^\s{}\[\],:][^{}\[\],:]*+")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\Z")


class GemmaParser(EnclosedParser):
    """Gemma 4: ``call:name{key:value}`` between tokens."""

    name = "gemma4"
    opening, closing = "<|tool_call>", "<tool_call|>"
    ends = ("<|tool_response>",)
    hint = f"Write <|tool_call>call:NAME{{KEY:{_QUOTE}text{_QUOTE},OTHER:3}}<tool_call|>."
    reasoning_tags: ClassVar = {**EnclosedParser.reasoning_tags, "<|channel>thought": "<channel|>"}
    _HEAD = re.compile(r"\s*+call:\s*+([^\s{]{1,256})\s*+(?=\{)")

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        head = self._HEAD.match(body)
        if head is None:
            raise Malformed("a call is call:NAME{KEY:value}")
        return [ToolCall(short_name(head[1]), json_arguments(_as_json(body[head.end() :])), self.call_id(number))]


def _as_json(text: str) -> str:
    """Text between the quotes as it is, and around it words as JSON has them."""
    pieces = text.split(_QUOTE)
    return "".join(json.dumps(piece) if i % 2 else _WORD.sub(_quoted, piece) for i, piece in enumerate(pieces))


def _quoted(word: re.Match[str]) -> str:
    written = word[0].rstrip()
    is_key = word.string.startswith(":", word.end())
    if not is_key and (written in _WORDS or _NUMBER.match(written)):
        return _WORDS.get(written, written)
    return json.dumps(written)
