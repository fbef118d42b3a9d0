"""``<tool_call>`` with JSON: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

from agentrl.tools.formats.base import Parsed, Parser, Read
from agentrl.tools.formats.strict_json import Malformed, kind, read_arguments, read_json, read_name
from agentrl.types import ToolCall


class HermesParser(Parser):
    """``<tool_call>`` with a JSON object of ``name`` and ``arguments``, any number in a turn."""

    name = "hermes"
    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    hint = 'Write {"name": "...", "arguments": {...}} between <tool_call> and </tool_call>.'

    def parse(self, text: str) -> Parsed:
        parsed = self._scan(text, {self.OPEN: ""})
        if not parsed.tool_calls and self.CLOSE in parsed.content:
            return self._stray(parsed, f"{self.CLOSE} without {self.OPEN}")
        return parsed

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read:
        # A closing tag inside a JSON string closes nothing: look for one after the object.
        value, end, error = None, start, None
        try:
            value, end = read_json(text, start)
        except Malformed as problem:
            error = str(problem)
        close = text.find(self.CLOSE, end)
        after = close + len(self.CLOSE) if close >= 0 else len(text)
        if close < 0:
            unclosed = f"{self.OPEN} is not closed by {self.CLOSE}"
            error = unclosed if error is None else f"{error}, and {unclosed}"
        elif error is None and text[end:close].strip():
            error = "text after the JSON object: write one object in each call"
        try:
            if error is not None:
                raise Malformed(error)
            if not isinstance(value, dict):
                raise Malformed(f"a call is a JSON object, got {kind(value)}")
            name = read_name(value)
            call = ToolCall(name, read_arguments(value.get("arguments", {})), self.call_id(number))
        except Malformed as problem:
            call = self._error(problem, number, name)
        return [call], after
