"""JSON schema of a callable, from its type hints and its Google-style docstring."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from agentrl.tools.annotations import Converter, described_by, read
from agentrl.tools.docstring import parse_docstring


@dataclass(frozen=True)
class Described:
    """What the model is told about a callable; ``parameters`` is a JSON schema of type object.

    ``converters`` make the objects of the type hints of JSON values, for the parameters that need it.
    """

    description: str
    parameters: dict[str, Any] | None
    converters: dict[str, Converter] = field(default_factory=dict)


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
    parameters, converters = _parameters(function, skip_self, {**class_args, **own_args}, name)
    return Described(text, parameters, converters)


def _parameters(
    function: Callable[..., Any], skip_self: bool, docs: dict[str, str], name: str
) -> tuple[dict[str, Any], dict[str, Converter]]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"Tool {name!r} has a type hint that cannot be resolved ({error}): define what it names at the top of a "
            "module."
        ) from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    converters: dict[str, Converter] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 and skip_self:
            continue
        where = f"Tool {name!r}, parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: the model passes arguments by name, so `*`, `**` and `/` have no place here.")
        if parameter.name not in hints:
            raise TypeError(f"{where} has no type hint.")
        hint = hints[parameter.name]
        description = docs.get(parameter.name) or described_by(hint)
        if not description:
            raise TypeError(f"{where} has no description: add `{parameter.name}: ...` under `Args:` in the docstring.")
        schema, converter = read(hint, where)
        schema["description"] = description
        default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(default, (str, int, float, bool)):
            schema["default"] = default
        properties[parameter.name] = schema
        if converter is not None:
            converters[parameter.name] = converter
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return parameters, converters
