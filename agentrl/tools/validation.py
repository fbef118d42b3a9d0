"""Checks a model's arguments and makes of them what the tool's signature asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentrl.tools.annotations import Converter
from agentrl.tools.base import ToolError, ToolErrorType
from agentrl.tools.json_schema import Mismatch, Path, fit, shorten, show

MAX_DEPTH = 64
"""Lists and objects inside one another."""
MAX_BITS = 4096
"""Of a whole number: about 1,200 digits. Longer ones cost quadratic time to write down."""


def validate(
    arguments: Mapping[str, Any],
    schema: dict[str, Any],
    tool: str,
    converters: Mapping[str, Converter] | None = None,
) -> dict[str, Any]:
    """The arguments to call ``tool`` with.

    Args:
        arguments: What the model wrote, as JSON values.
        schema: JSON schema of type object, see :mod:`agentrl.tools.json_schema`.
        tool: Name, for the message.
        converters: By parameter, what makes the object its type hint asks for.

    Raises:
        ToolError: Of type ``invalid_arguments``; names the argument, what was given and what is expected.
    """
    if not isinstance(arguments, Mapping):
        raise ToolError(f"{tool}: the arguments must be an object.", ToolErrorType.INVALID_ARGUMENTS)
    properties = schema.get("properties", {})
    problems: list[str] = []
    if schema.get("additionalProperties") is False:
        unknown = [name for name in arguments if name not in properties]
        if unknown:
            expected = shorten(", ".join(map(show, properties)), 200) or "no arguments"
            problems.append(f"unknown argument {show(unknown[0])}, expected {expected}")
    missing = [name for name in schema.get("required", []) if name not in arguments]
    if missing:
        problems.append(f"missing argument {show(missing[0])}")
    rest = schema.get("additionalProperties", True)
    result = {}
    for name, value in arguments.items():
        if problem := _unusable(value):
            problems.append(f"argument {show(name)} {problem}")
            continue
        try:
            fitted = fit(value, properties.get(name, rest if isinstance(rest, dict) else True), schema, (name,))
        except Mismatch as mismatch:
            problems.append(f"argument {_written(mismatch.path or (name,))} {mismatch.text}")
            continue
        if fitted is not value and (problem := _unusable(fitted)):  # what stood in a string of JSON
            problems.append(f"argument {show(name)} {problem}")
            continue
        try:
            result[name] = converters[name](fitted) if converters and name in converters else fitted
        except ValueError as error:
            problems.append(f"argument {show(name)}: {shorten(' '.join(str(error).split()), 200)}")
    if not problems:
        # `allOf`, `anyOf` and the like beside the properties speak about the arguments together.
        together = {key: value for key, value in schema.items() if key in ("allOf", "anyOf", "oneOf")}
        try:
            fit(dict(arguments), together, schema)
        except Mismatch as mismatch:
            problems.append(f"argument {_written(mismatch.path)} {mismatch.text}" if mismatch.path else mismatch.text)
    if problems:
        text = "; ".join(shorten(problem, 500) for problem in problems[:3])
        raise ToolError(f"{tool}: {text}.", ToolErrorType.INVALID_ARGUMENTS)
    return result


def _written(path: Path) -> str:
    """A place in the arguments, such as ``"order.items[0].name"``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return show(text.removeprefix("."))


def _unusable(value: Any) -> str:
    """What no tool can be given, whatever its schema; empty when there is nothing."""
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        if depth > MAX_DEPTH:
            return f"is nested deeper than {MAX_DEPTH}"
        if isinstance(item, str):
            if "\0" in item:
                return "contains a null character"
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                return "contains half of a character (a lone surrogate)"
        elif isinstance(item, bool) or item is None:
            continue
        elif isinstance(item, int):
            if item.bit_length() > MAX_BITS:
                return "contains a number with too many digits"
        elif isinstance(item, float):
            if not math.isfinite(item):
                return f"contains {item}, which is not a number of JSON"
        elif isinstance(item, list):
            left.extend((part, depth + 1) for part in item)
        elif isinstance(item, dict):
            left.extend((part, depth + 1) for pair in item.items() for part in pair)
        else:
            return f"contains a {type(item).__name__}, which is not JSON"
    return ""
