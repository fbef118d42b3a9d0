"""Type hints read once: the JSON schema the model sees, and what makes the hinted object of a JSON value."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, Union

from agentrl.tools.docstring import parse_docstring
from agentrl.tools.json_schema import fits, without_titles

Converter = Callable[[Any], Any]
"""From a JSON value that fits the schema to the object; raises ValueError with words for the model."""

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_KNOWN = (
    "str, int, float, bool, None, Any, Literal, Optional, a union, Enum, list, tuple, set, dict, TypedDict, "
    "a dataclass or a pydantic model"
)


class Reading(NamedTuple):
    """What a hint means. ``converter`` is None where the JSON value is already what the hint asks for."""

    schema: dict[str, Any]
    converter: Converter | None = None


def schema_of(hint: Any, where: str = "a value") -> dict[str, Any]:
    """JSON schema of a type hint; see :func:`read`."""
    return read(hint, where).schema


def described_by(hint: Any) -> str:
    """The description in ``Annotated[type, "description"]``, or in a pydantic ``Field`` there; else empty."""
    for extra in getattr(hint, "__metadata__", ()):
        text = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(text, str) and text:
            return text
    return ""


def read(hint: Any, where: str = "a value", inside: tuple[Any, ...] = ()) -> Reading:
    """Schema and converter of a type hint.

    Knows str, int, float, bool, None, Any, Literal, Optional and unions, Enum, list, tuple, set, dict with
    string keys, TypedDict, dataclasses and pydantic models, all of them nested, and ``Annotated``.

    Args:
        hint: The hint, with its extras.
        where: Where it stands, for errors.
        inside: The classes it is nested in.

    Raises:
        TypeError: Any other type, or one that contains itself; the text says ``where``.
    """
    if hint is Any or hint is object:
        return Reading({})
    if hint is None or hint in _SCALARS:
        return Reading({"type": _SCALARS.get(hint, "null")})
    if _needs_pydantic(hint):
        return _pydantic(hint, where)
    if isinstance(hint, typing.NewType):
        return read(hint.__supertype__, where, inside)
    if hasattr(hint, "__value__") and hasattr(hint, "__type_params__"):  # `type X = ...`
        return read(hint.__value__, where, inside)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        reading = read(arguments[0], where, inside)
        text = described_by(hint)
        return Reading({**reading.schema, "description": text}, reading.converter) if text else reading
    if origin is Literal:
        return Reading(_literal(arguments, where))
    if origin in (Union, types.UnionType):
        return _union(arguments, where, inside)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint, where)
    if isinstance(hint, type) and (typing.is_typeddict(hint) or dataclasses.is_dataclass(hint)):
        if hint in inside:
            raise TypeError(f"{where}: {hint.__name__} contains itself, so its schema would have no end.")
        return _record(hint, where, (*inside, hint))
    container = origin or hint
    if container in (list, Sequence, Iterable, set, frozenset):
        return _list(container, arguments, where, inside)
    if container is tuple:
        return _tuple(arguments, where, inside)
    if container in (dict, Mapping):
        return _dict(hint, arguments, where, inside)
    raise TypeError(f"{where} has type {hint}, which has no schema here. Use {_KNOWN}.")


def _literal(values: tuple[Any, ...], where: str) -> dict[str, Any]:
    kinds = {type(v) for v in values}
    if not kinds <= set(_SCALARS):
        raise TypeError(f"{where}: Literal may hold strings, numbers, booleans and None, got {values}.")
    schema: dict[str, Any] = {"enum": list(values)}
    if len(kinds) == 1:
        schema["type"] = _SCALARS[kinds.pop()]
    return schema


def _union(options: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> Reading:
    readings = [read(option, where, inside) for option in options]
    schema = {"anyOf": [reading.schema for reading in readings]}
    if all(reading.converter is None for reading in readings):
        return Reading(schema)

    def convert(value: Any) -> Any:
        problem = ValueError("fits none of the types")
        for reading in readings:
            if fits(value, reading.schema):
                try:
                    return _converted(value, reading.converter)
                except ValueError as error:
                    problem = error
        raise problem

    return Reading(schema, convert)


def _enum(enum: type[Enum], where: str) -> Reading:
    members = {member.value: member for member in enum if type(member.value) in _SCALARS}
    if len(members) < len(enum):  # values that JSON has no word for go by their names
        members = {member.name: member for member in enum}
    if not members:
        raise TypeError(f"{where}: {enum.__name__} has no members.")
    return Reading(_literal(tuple(members), where), lambda value: members[value])


def _list(container: Any, arguments: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> Reading:
    item = read(arguments[0], where, inside) if arguments else Reading({})
    schema: dict[str, Any] = {"type": "array", **({"items": item.schema} if arguments else {})}
    if container not in (set, frozenset):
        return Reading(schema, _each(item.converter, list) if item.converter else None)
    return Reading({**schema, "uniqueItems": True}, _each(item.converter, container))


def _tuple(arguments: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> Reading:
    if not arguments:
        return Reading({"type": "array"}, tuple)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = read(arguments[0], where, inside)
        return Reading({"type": "array", "items": item.schema}, _each(item.converter, tuple))
    items = [read(argument, where, inside) for argument in arguments]
    schema = {
        "type": "array",
        "prefixItems": [item.schema for item in items],
        "minItems": len(items),
        "maxItems": len(items),
    }
    return Reading(schema, lambda values: tuple(_converted(v, i.converter) for v, i in zip(values, items, strict=True)))


def _dict(hint: Any, arguments: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> Reading:
    if not arguments:
        return Reading({"type": "object"})
    if arguments[0] is not str:
        raise TypeError(f"{where}: a dict from JSON has string keys, got {hint}.")
    value = read(arguments[1], where, inside)
    schema = {"type": "object", "additionalProperties": value.schema}
    if value.converter is None:
        return Reading(schema)
    return Reading(schema, lambda values: {name: _converted(v, value.converter) for name, v in values.items()})


def _record(cls: type, where: str, inside: tuple[Any, ...]) -> Reading:
    """A TypedDict or a dataclass: an object whose properties are its fields."""
    text, docs = parse_docstring(cls.__doc__ or "")
    hints = typing.get_type_hints(cls, include_extras=True)
    if typing.is_typeddict(cls):
        names, required, texts = list(hints), [n for n in hints if _required(n, hints[n], cls)], {}
        make: Callable[..., Any] = dict
    else:
        fields = [f for f in dataclasses.fields(cls) if f.init]
        missing = dataclasses.MISSING
        names = [f.name for f in fields]
        required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
        texts = {f.name: f.metadata["description"] for f in fields if "description" in f.metadata}
        make = cls
        text = "" if text.startswith(f"{cls.__name__}(") else text  # written by dataclasses itself
    readings = {name: read(_bare(hints[name]), f"{where}, {cls.__name__}.{name}", inside) for name in names}
    for name, reading in readings.items():
        described = described_by(hints[name]) or texts.get(name) or docs.get(name)
        if described:
            reading.schema["description"] = described
    schema: dict[str, Any] = {"type": "object", **({"description": text.split("\n\n")[0]} if text else {})}
    schema["properties"] = {name: reading.schema for name, reading in readings.items()}
    schema |= {"required": required, "additionalProperties": False}

    def convert(values: dict[str, Any]) -> Any:
        return _made(make, {name: _converted(value, readings[name].converter) for name, value in values.items()})

    return Reading(schema, convert)


def _required(name: str, hint: Any, cls: Any) -> bool:
    """Whether a TypedDict's key is; its own record overlooks ``NotRequired`` in postponed annotations."""
    said = str(typing.get_origin(hint)).rpartition(".")[2]
    return said == "Required" or (said != "NotRequired" and name in cls.__required_keys__)


def _bare(hint: Any) -> Any:
    """Without ``Required``, ``NotRequired`` and ``ReadOnly``, which say something about the key."""
    while str(typing.get_origin(hint)).rpartition(".")[2] in ("Required", "NotRequired", "ReadOnly"):
        (hint,) = typing.get_args(hint)
    return hint


def _made(make: Callable[..., Any], values: dict[str, Any]) -> Any:
    """The object, whose own checks (``__post_init__``) speak to the model through ValueError and TypeError."""
    try:
        return make(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _each(converter: Converter | None, container: Callable[[Any], Any]) -> Converter:
    return lambda values: container([_converted(value, converter) for value in values])


def _converted(value: Any, converter: Converter | None) -> Any:
    return value if converter is None else converter(value)


# -- pydantic, where the author uses it --------------------------------------------------------------


def _needs_pydantic(hint: Any) -> bool:
    """Whether pydantic alone can read the hint: a model, a dataclass of its kind, or constraints."""
    if isinstance(hint, type):
        # Nothing is imported to find out: a class of pydantic's brings its validator along.
        return hasattr(hint, "__pydantic_core_schema__") and hasattr(hint, "__pydantic_validator__")
    extras = getattr(hint, "__metadata__", ())
    return any(type(e).__module__.split(".")[0] in ("pydantic", "annotated_types") for e in extras)


def _pydantic(hint: Any, where: str) -> Reading:
    import pydantic

    adapter: Any = pydantic.TypeAdapter(hint)
    schema = adapter.json_schema()
    definitions = schema.pop("$defs", {})

    def convert(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error

    return Reading(_inlined(without_titles(schema), without_titles(definitions), where, ()), convert)


def _inlined(node: Any, definitions: dict[str, Any], where: str, inside: tuple[str, ...]) -> Any:
    """The schema with its references replaced by what they name: models read it, not programs."""
    if isinstance(node, list):
        return [_inlined(item, definitions, where, inside) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str):
        name = reference.rpartition("/")[2]
        if name in inside:
            raise TypeError(f"{where}: {name} contains itself, so its schema would have no end.")
        node = {**definitions[name], **{key: value for key, value in node.items() if key != "$ref"}}
        inside = (*inside, name)
    return {
        key: value if key in ("default", "enum", "const") else _inlined(value, definitions, where, inside)
        for key, value in node.items()
    }
