"""Checks a model's arguments against a JSON schema and turns near misses into the right type.

Models write ``"3"`` for 3 and ``3.0`` for an integer; those are taken. Anything that would need a
guess is refused, with a sentence that tells the model what is expected.
"""

from __future__ import annotations

import json
import math
from typing import Any

from agentrl.tools.base import ToolError, ToolErrorType

_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MISSING = object()


def validate(arguments: dict[str, Any], schema: dict[str, Any], tool: str) -> dict[str, Any]:
    """The arguments to call ``tool`` with.

    Args:
        arguments: What the model wrote.
        schema: JSON schema of type object: ``type``, ``enum``, ``anyOf``, ``items``, ``properties``,
            ``required``, ``additionalProperties`` are looked at.
        tool: Name, for the message.

    Raises:
        ToolError: Of type ``invalid_arguments``; names the argument, what was given and what is expected.
    """
    properties = schema.get("properties", {})
    problems: list[str] = []
    if schema.get("additionalProperties") is False:
        unknown = [name for name in arguments if name not in properties]
        if unknown:
            problems.append(f"unknown argument {_show(unknown[0])}, expected {_names(properties)}")
    missing = [name for name in schema.get("required", []) if name not in arguments]
    if missing:
        problems.append(f"missing argument {_show(missing[0])}")
    result = {}
    for name, value in arguments.items():
        if "\0" in str(value):
            problems.append(f"argument {_show(name)} contains a null character")
            continue
        expected = properties.get(name, {})
        coerced = coerce(value, expected)
        if coerced is _MISSING:
            problems.append(f"argument {_show(name)} must be {expectation(expected)}, got {_show(value)}")
        else:
            result[name] = coerced
    if problems:
        raise ToolError(f"{tool}: {'; '.join(problems[:3])}.", ToolErrorType.INVALID_ARGUMENTS)
    return result


def coerce(value: Any, schema: dict[str, Any]) -> Any:
    """``value`` in the type ``schema`` asks for, or a marker (``coerce.failed``) when it does not fit."""
    if "anyOf" in schema:
        return _coerce_any(value, schema["anyOf"])
    if "enum" in schema:
        return _coerce_enum(value, schema["enum"])
    kind = schema.get("type")
    if kind is None:
        return value
    if isinstance(kind, list):
        return _coerce_any(value, [{**schema, "type": k} for k in kind])
    return _COERCIONS[kind](value, schema) if kind in _COERCIONS else value


coerce.failed = _MISSING  # type: ignore[attr-defined]


def expectation(schema: dict[str, Any]) -> str:
    """What ``schema`` asks for, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(expectation(option) for option in schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(_show(v) for v in schema["enum"])
    kind = schema.get("type")
    if kind == "array" and schema.get("items", {}).get("type") in _NAMES:
        return f"a list, each of it {_NAMES[schema['items']['type']]}"
    if isinstance(kind, list):
        return " or ".join(_NAMES.get(k, k) for k in kind)
    return _NAMES.get(kind, "a value")


def _coerce_any(value: Any, options: list[dict[str, Any]]) -> Any:
    # A value that already has the type of an option must not be turned into another one.
    for option in options:
        coerced = coerce(value, option)
        if coerced is not _MISSING and type(coerced) is type(value) and coerced == value:
            return coerced
    for option in options:
        coerced = coerce(value, option)
        if coerced is not _MISSING:
            return coerced
    return _MISSING


def _coerce_enum(value: Any, allowed: list[Any]) -> Any:
    for option in allowed:
        if type(option) is type(value) and option == value:
            return option
    for option in allowed:
        if str(option).lower() == str(value).strip().lower():
            return option
    return _MISSING


def _string(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return _MISSING


def _integer(value: Any, schema: dict[str, Any]) -> Any:
    number = _number(value, schema)
    return int(number) if number is not _MISSING and number == int(number) else _MISSING


def _number(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, str):
        text = value.strip()
        if len(text) > 64 or "_" in text:
            return _MISSING
        try:
            value = int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            return _MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _MISSING
    return value if isinstance(value, int) or math.isfinite(value) else _MISSING


def _float(value: Any, schema: dict[str, Any]) -> Any:
    number = _number(value, schema)
    try:
        return _MISSING if number is _MISSING else float(number)
    except OverflowError:
        return _MISSING


def _boolean(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower(), _MISSING)
    return _MISSING


def _null(value: Any, schema: dict[str, Any]) -> Any:
    return None if value is None or (isinstance(value, str) and value.strip().lower() in ("null", "none")) else _MISSING


def _from_text(value: Any) -> Any:
    """A list or object the model wrote as a string of JSON."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _array(value: Any, schema: dict[str, Any]) -> Any:
    value = _from_text(value)
    if not isinstance(value, list):
        return _MISSING
    items = [coerce(item, schema.get("items", {})) for item in value]
    return _MISSING if any(item is _MISSING for item in items) else items


def _object(value: Any, schema: dict[str, Any]) -> Any:
    value = _from_text(value)
    if not isinstance(value, dict) or any(name not in value for name in schema.get("required", [])):
        return _MISSING
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
    if rest is False and any(name not in properties for name in value):
        return _MISSING
    rest = rest if isinstance(rest, dict) else {}
    result = {name: coerce(item, properties.get(name, rest)) for name, item in value.items()}
    return _MISSING if any(item is _MISSING for item in result.values()) else result


_COERCIONS = {
    "string": _string,
    "integer": _integer,
    "number": _float,
    "boolean": _boolean,
    "null": _null,
    "array": _array,
    "object": _object,
}


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _names(properties: dict[str, Any]) -> str:
    return ", ".join(_show(name) for name in properties) or "no arguments"
