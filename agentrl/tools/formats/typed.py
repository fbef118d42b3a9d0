"""Values that a format writes without quotes, typed by the tool's schema."""

from __future__ import annotations

from typing import Any

from agentrl.tools.formats.pythonic import python_value
from agentrl.tools.formats.strict_json import Malformed, read_json

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_JSON_KINDS = frozenset([*_KINDS.values(), "null"])


def typed(text: str, schema: Any, root: Any = None) -> Any:
    """The value that ``text`` stands for by the argument's ``schema``, whose definitions are in ``root``. Text stays as
    it was written where the schema takes text alone, and where it is nothing that the schema takes: then the tool's own
    check says what is wrong with it."""
    kinds = kinds_of(schema, root)
    if kinds == {"string"}:
        return text
    for value in _readings(text.strip()):
        kind = "null" if value is None else _KINDS[type(value)]
        if kind in kinds or (kind == "integer" and "number" in kinds):
            return value
    return text


def kinds_of(schema: Any, root: Any = None) -> frozenset[str]:
    """The JSON types that a schema takes; all of them where it does not say."""
    return frozenset(_kinds(schema, root, 0)) or _JSON_KINDS


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """``schema``, or what it refers to; empty where there is none."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return {}


def _kinds(schema: Any, root: Any, depth: int) -> set[str]:
    schema = resolved(schema, root)
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(named if isinstance(named, list) else ())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not kinds and isinstance(values, list):
        kinds = {"null" if value is None else _KINDS.get(type(value), "string") for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if depth < 8 and isinstance(schema.get(key), list):
            kinds |= set().union(*(_kinds(choice, root, depth + 1) for choice in schema[key]))
    if schema.get("nullable") is True:
        kinds.add("null")
    return kinds & _JSON_KINDS


def _readings(text: str) -> list[Any]:
    """``text`` as JSON, or else as a literal of Python, which some templates write."""
    for read in (_json_value, python_value):
        try:
            return [read(text)]
        except Malformed:
            continue
    return []


def _json_value(text: str) -> Any:
    value, end = read_json(text)
    if end != len(text):
        raise Malformed("text after the value")
    return value
