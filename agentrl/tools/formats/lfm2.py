"""LFM2 and SmolLM3: calls as Python, between tokens."""

from __future__ import annotations

from agentrl.tools.formats.framed import JsonListParser
from agentrl.tools.formats.pythonic import python_calls
from agentrl.tools.formats.strict_json import Malformed
from agentrl.types import ToolCall


class Lfm2Parser(JsonListParser):
    """LFM2 and 2.5: a Python list of calls, or, when asked for, a JSON list."""

    name = "lfm2"
    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    hint = 'Write <|tool_call_start|>[NAME(argument="value", other=3)]<|tool_call_end|>.'

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        if body.lstrip().startswith(("[{", "{")):
            return super()._calls(body, number)
        body = body.strip()
        try:
            calls = python_calls(body, lambda i: self.call_id(number + i))
        except Malformed:
            if "\n" not in body:
                raise
            # The template writes text as it is between quotes, lines and all.
            calls = python_calls(body.replace("\n", "\\n"), lambda i: self.call_id(number + i))
        if not calls:
            raise Malformed("the list of calls is empty")
        return calls


class SmolPythonParser(Lfm2Parser):
    """SmolLM3 with ``python_tools``: a call in Python in ``<code>``."""

    name = "smollm3_python"
    opening, closing = "<code>", "</code>"
    hint = 'Write <code>NAME(argument="value", other=3)</code>.'

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        return super()._calls(f"[{body.strip()}]", number)
