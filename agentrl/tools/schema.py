"""JSON schema of a callable, from its type hints and its Google-style docstring."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class Described:
    """What the model is told about a callable; ``parameters`` is a JSON schema of type object."""

    description: str
    parameters: dict[str, Any] | None


def describe(
    function: Callable[..., Any],
    *,
    skip_self: bool,
    name: str,
    description: str = "",
    fallback_doc: str | None = "",
    needs_schema: bool = True,
) -> Described:
    """Description and parameter schema of ``function``.

    Args:
        function: The callable; read, not called.
        skip_self: Whether its first parameter is ``self``.
        name: The tool's name, for error messages.
        description: Overrides the description of the docstring.
        fallback_doc: A second docstring (the class's) to look in.
        needs_schema: False when the author gives the schema.

    Raises:
        TypeError: A description or type hint is missing, or a type has no schema.
    """
    own_text, own_args = parse_docstring(function.__doc__ or "")
    class_text, class_args = parse_docstring(fallback_doc or "")
    text = description or class_text or own_text
    if not text:
        raise TypeError(f"Tool {name!r} has no description: write a docstring, the model reads it.")
    if not needs_schema:
        return Described(text, None)
    parameters = _parameters(function, skip_self, {**class_args, **own_args}, name)
    return Described(text, parameters)


def _parameters(function: Callable[..., Any], skip_self: bool, docs: dict[str, str], name: str) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 and skip_self:
            continue
        where = f"Tool {name!r}, parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: the model passes arguments by name, so `*`, `**` and `/` have no place here.")
        if parameter.name not in hints:
            raise TypeError(f"{where} has no type hint.")
        if not docs.get(parameter.name):
            raise TypeError(f"{where} has no description: add `{parameter.name}: ...` under `Args:` in the docstring.")
        schema = schema_of(hints[parameter.name], where)
        schema["description"] = docs[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, (str, int, float, bool)):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schema_of(hint: Any, where: str = "a value") -> dict[str, Any]:
    """JSON schema of a type hint.

    Knows str, int, float, bool, None, Any, Literal, Optional and unions, list, set and tuple of one
    type, dict with string keys.

    Raises:
        TypeError: Any other type; the text says ``where``.
    """
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return schema_of(arguments[0], where)
    if origin is Literal:
        return _literal(arguments, where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(a, where) for a in arguments]}
    container = origin or hint
    if container in (list, Sequence):
        return {"type": "array", **({"items": schema_of(arguments[0], where)} if arguments else {})}
    if container in (dict, Mapping):
        if arguments and arguments[0] is not str:
            raise TypeError(f"{where}: a dict from JSON has string keys, got {hint}.")
        return {"type": "object", **({"additionalProperties": schema_of(arguments[1], where)} if arguments else {})}
    raise TypeError(
        f"{where} has type {hint}, which has no schema here. Use str, int, float, bool, None, Any, Literal, "
        "Optional, a union, list or dict."
    )


def _literal(values: tuple[Any, ...], where: str) -> dict[str, Any]:
    kinds = {type(v) for v in values}
    if not kinds <= set(_SCALARS):
        raise TypeError(f"{where}: Literal may hold strings, numbers, booleans and None, got {values}.")
    schema: dict[str, Any] = {"enum": list(values)}
    if len(kinds) == 1:
        schema["type"] = _SCALARS[kinds.pop()]
    return schema


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Splits a Google-style docstring into the text before the sections and the entries of ``Args:``."""
    text: list[str] = []
    entries: dict[str, str] = {}
    section, indent, current = "", 0, ""
    for line in inspect.cleandoc(doc).splitlines():
        header = _SECTION.match(line)
        if header:
            section, indent, current = header.group(1), 0, ""
        elif not section:
            text.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ENTRY.match(line.strip()) if depth <= indent else None
            if entry:
                current = entry.group(1)
                entries[current] = entry.group(2).strip()
            elif current:
                entries[current] = f"{entries[current]} {line.strip()}".strip()
    return "\n".join(text).strip(), entries
