"""JSON as models write it: strict about what two readers could understand in two ways."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

from agentrl.types import ToolCall

MAX_DEPTH = 64
"""Nesting of lists and objects in arguments."""


class Malformed(ValueError):
    """A call cannot be read. The text says why, in words for the model that wrote it."""


def clean_text(text: str) -> str:
    """``text`` with lone surrogates replaced, so that it can be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key[:40]!r}")
        # One string for all calls with this key: a rollout holds very many of them.
        result[sys.intern(key) if len(key) <= 64 else key] = value
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:40]} is too large")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def skip_space(text: str, start: int) -> int:
    """The position of the first character from ``start`` on that is not white space."""
    space = _SPACE.match(text, start)
    return space.end() if space else start


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at ``start``, white space aside, and the position after it.
    Raises Malformed: no JSON there; a duplicate key; NaN, an infinity or a number too large for a float."""
    try:
        space = _SPACE.match(text, start)
        return _DECODER.raw_decode(text, space.end() if space else start)
    except json.JSONDecodeError as problem:
        raise Malformed(f"not valid JSON: {problem.msg}") from None
    except RecursionError:
        raise Malformed("not valid JSON: nested too deeply") from None
    except ValueError as problem:
        raise Malformed(f"not valid JSON: {str(problem)[:120]}") from None


def read_arguments(value: Any, key: str = "arguments") -> dict[str, Any]:
    """The arguments of a call: an object, or, as in the OpenAI interface, a string that holds one.
    Raises Malformed: neither, or nested deeper than :data:`MAX_DEPTH`. ``key`` is what the text calls it."""
    if isinstance(value, str):
        try:
            value, end = read_json(text := value)
        except Malformed as problem:
            raise Malformed(f'"{key}" is {problem}') from None
        if text[end:].strip():
            raise Malformed(f'"{key}" is not valid JSON: Extra data')
    if not isinstance(value, dict):
        raise Malformed(f'"{key}" must be a JSON object, got {kind(value)}')
    for name, given in value.items():
        if type(given) in (dict, list) or not name.isascii() or (type(given) is str and not given.isascii()):
            return _cleaned(value, key)
    return value


def read_name(value: dict[str, Any]) -> str:
    """The name of the tool in a JSON call. Raises Malformed: it has none."""
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Malformed('"name" must be the name of a tool')
    return short_name(name)


def json_call(value: Any, call_id: str = "", key: str = "arguments") -> ToolCall:
    """A call written as a JSON object of ``name`` and ``key``. Raises Malformed: it is none."""
    if not isinstance(value, dict):
        raise Malformed(f"a call is a JSON object, got {kind(value)}")
    return ToolCall(read_name(value), read_arguments(value.get(key, {}), key), call_id)


def short_name(name: str) -> str:
    """A tool's name as a model wrote it, in a bounded length."""
    return sys.intern((name if name.isascii() else clean_text(name))[:128])


def kind(value: Any) -> str:
    """The JSON type of ``value``, in words."""
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return kinds.get(type(value), "null")


def _cleaned(value: Any, key: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise Malformed(f'"{key}" are nested deeper than {MAX_DEPTH}')
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_cleaned(item, key, depth + 1) for item in value]
    if isinstance(value, dict):
        return {clean_text(name): _cleaned(item, key, depth + 1) for name, item in value.items()}
    return value
