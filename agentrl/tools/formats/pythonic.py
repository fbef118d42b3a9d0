"""``[search(query="x"), read(page=2)]``: calls as a list of Python calls (Llama 4, and Llama 3.2 when asked to).

Read by Python's own parser. (The regular expression of SGLang's detector takes exponential time on arguments such as
``"a=1,a=1,a=1,..."``.)
"""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

from agentrl.tools.formats.base import MAX_CALLS, Parsed, Parser, Read
from agentrl.tools.formats.strict_json import Malformed, read_arguments, short_name
from agentrl.types import ToolCall

MAX_CHARACTERS = 1 << 20
"""Length of a list of calls; a longer one is refused unread."""
MAX_BITS = 14_000
"""Of a whole number. Python writes out some 4,300 digits, and a hexadecimal literal can stand for more."""

_TOKENS = ("<|python_start|>", "<|python_end|>")
_LIST = re.compile(r"\s*(?=\[\s*[A-Za-z_][\w.]*\s*\()")
_LAST_LINES = re.compile(r"^[ \t]*(?=\[\s*[A-Za-z_][\w.]*\s*\()", re.MULTILINE)
_quiet = threading.Lock()


class PythonicParser(Parser):
    """A list of calls with keyword arguments, all of them literals: the whole turn, or its end after words."""

    name = "pythonic"
    hint = 'Write [NAME(argument="value", other=3)] and nothing else.'

    def parse(self, text: str) -> Parsed:
        for token in _TOKENS:
            text = text.replace(token, "")
        parsed = self._scan(text, {}, _LIST)
        return parsed if parsed.tool_calls else self._after_words(parsed)

    def _after_words(self, parsed: Parsed) -> Parsed:
        """The turn with the list that it ends with, on lines of its own. What is no list of calls is an answer."""
        found = _LAST_LINES.search(parsed.content)
        if found is None or not parsed.content.endswith("]"):
            return parsed
        words = [parsed.content[: found.start()]]
        read = self._read_calls(parsed.content, found.end(), "", 0)
        if not all(call.name for call in read[0]):
            return parsed
        calls, _ = self._noted(read, parsed.content, found.start(), words, [])
        return Parsed("".join(words).strip(), parsed.reasoning, calls)

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read:
        end = text.rfind("]", start) + 1
        try:
            if not end:
                raise Malformed("the list of calls is not closed by ]")
            return python_calls(text[start:end], self.call_id), end
        except Malformed as problem:
            return [self._error(problem, number)], len(text)


def python_calls(source: str, call_id: Callable[[int], str]) -> list[ToolCall]:
    """The calls in a Python list of calls. Raises Malformed: it is none."""
    parsed = _expression(source)
    if not isinstance(parsed, ast.List):
        raise Malformed("calls are a Python list of calls")
    return [_call(item, call_id(i)) for i, item in enumerate(parsed.elts[: MAX_CALLS + 1])]


def python_value(source: str) -> Any:
    """The JSON value of a Python literal. Raises Malformed: it is none."""
    return _literal(_expression(source))


def _expression(source: str) -> ast.expr:
    if len(source) > MAX_CHARACTERS:
        raise Malformed(f"the list of calls is longer than {MAX_CHARACTERS} characters")
    with _quiet, warnings.catch_warnings():  # "\d" in a string is fine
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source, mode="eval").body
        except (RecursionError, MemoryError):
            raise Malformed("nested too deeply") from None
        except (SyntaxError, ValueError) as problem:
            said = problem.msg if isinstance(problem, SyntaxError) else str(problem)
            raise Malformed(f"not a Python list of calls: {said[:120]}") from None


def _call(node: ast.expr, call_id: str) -> ToolCall:
    name = ""
    try:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            raise Malformed("each item of the list must be a call, NAME(argument=value)")
        name = short_name(_dotted(node.func))
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise Malformed("arguments are given by name, as in NAME(argument=value)")
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg in arguments:
                raise Malformed(f"argument {keyword.arg[:40]!r} is given twice")
            arguments[str(keyword.arg)] = _literal(keyword.value)
        return ToolCall(name, read_arguments(arguments), call_id)
    except Malformed as problem:
        return ToolCall(name, {}, call_id, str(problem))


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise Malformed("a call starts with the name of a tool")
    return ".".join([node.id, *reversed(parts)])


def _literal(node: ast.expr) -> Any:
    """A literal as a JSON value; keys of a dict become text, tuples become lists."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bool | int | float | None):
        too_long = isinstance(node.value, int) and node.value.bit_length() > MAX_BITS
        if too_long or (isinstance(node.value, float) and node.value in (float("inf"), float("-inf"))):
            raise Malformed("a number is too large")
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key for key in node.keys if isinstance(key, ast.Constant)]
        if len(keys) < len(node.keys):
            raise Malformed("the keys of a dict must be literals")
        pairs = [(str(_literal(key)), _literal(value)) for key, value in zip(keys, node.values, strict=True)]
        if len({key for key, _ in pairs}) < len(pairs):
            raise Malformed("a dict has a key twice")
        return dict(pairs)
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    raise Malformed("the value of an argument must be a literal: text, a number, True, False, None, a list or a dict")
