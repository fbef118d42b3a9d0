"""``<name>text</name>`` for names that an environment declares."""

from __future__ import annotations

from agentrl.tools.formats.base import Parsed, Parser, Read
from agentrl.types import ToolCall


class TagParser(Parser):
    """``<name>text</name>`` for declared names, given without brackets; the text is the call's one argument,
    ``text``."""

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
        return self._stray(parsed, f"{stray} without <{stray[2:]}")

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read:
        close = text.find(f"</{name}>", start)
        if close < 0:
            return [self._error(f"<{name}> is not closed by </{name}>", number, name)], len(text)
        body, after = text[start:close], close + len(name) + 3
        nested = next((n for n in self.names if f"<{n}>" in body), None)
        if nested is not None:
            return [self._error(f"<{nested}> inside <{name}>", number, name)], after
        return [ToolCall(name, {"text": body.strip()}, self.call_id(number))], after
