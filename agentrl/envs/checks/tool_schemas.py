"""Whether tools are described the way chat templates and servers take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}\Z", re.ASCII)
_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}


def schema_problems(tools: Sequence[Any]) -> list[str]:
    """What is wrong with tools in the OpenAI form (``{"type": "function", "function": {...}}``), in words.

    With the package ``jsonschema`` installed, parameters are also checked against JSON Schema's own schema.
    """
    problems: list[str] = []
    names: set[str] = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            problems.append(f"a tool is {tool!r:.80}; {{'type': 'function', 'function': {{...}}}} is expected")
            continue
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.match(name):
            problems.append(f"a tool is named {name!r:.80}; letters, digits, _ and - are expected, at most 64")
            continue
        if name in names:
            problems.append(f"two tools are named {name!r}")
        names.add(name)
        if not str(function.get("description") or "").strip():
            problems.append(f"tool {name!r} has no description")
        parameters = function.get("parameters")
        if not isinstance(parameters, dict) or parameters.get("type") != "object":
            problems.append(
                f"tool {name!r}: parameters are {parameters!r:.80}; a JSON schema of type object is expected"
            )
            continue
        problems += [f"tool {name!r}: {text}" for text in _parameter_problems(parameters)]
    return problems


def _parameter_problems(parameters: dict[str, Any]) -> list[str]:
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return ["'properties' must be an object and 'required' a list"]
    found = [f"{name!r} is required and not described" for name in required if name not in properties]
    for name, part in properties.items():
        if not isinstance(part, dict):
            found.append(f"parameter {name!r} is {part!r:.60}; a JSON schema is expected")
            continue
        kinds = part.get("type", [])
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind not in _TYPES:
                found.append(f"parameter {name!r} has the type {kind!r}; JSON has {', '.join(sorted(_TYPES))}")
    return found or _by_jsonschema(parameters)


def _by_jsonschema(parameters: dict[str, Any]) -> list[str]:
    try:
        import jsonschema
    except ImportError:
        return []
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        return [f"its schema is not valid: {error.message}"]
    return []
