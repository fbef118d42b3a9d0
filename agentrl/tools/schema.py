"""JSON schema of a callable, from its type hints and its Google-style docstring. The schemas are pydantic's."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_KNOWN = (
    "str, int, float, bool, None, Any, Literal, Optional, a union, Enum, list, tuple, set, dict, TypedDict, "
    "a dataclass or a pydantic model"
)


@dataclass(frozen=True)
class Described:
    """What the model is told about a callable.

    ``parameters`` is a JSON schema of type object; ``adapter`` makes the objects of the type hints of arguments. Both
    are None when the author gives the schema.
    """

    description: str
    parameters: dict[str, Any] | None = None
    adapter: TypeAdapter[dict[str, Any]] | None = None


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
    own_text, own_args = parse_docstring(function.__doc__ or "", name)
    class_text, class_args = parse_docstring(fallback_doc or "", name)
    text = description or class_text or own_text
    if not text:
        raise TypeError(f"Tool {name!r} has no description: write a docstring, the model reads it.")
    if not needs_schema:
        return Described(text)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"Tool {name!r} has a type hint that cannot be resolved ({error}): define what it names at the top of a "
            "module."
        ) from error
    described: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[int(skip_self) :]:
        where = f"Tool {name!r}, parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: the model passes arguments by name, so `*`, `**` and `/` have no place here.")
        if parameter.name not in hints:
            raise TypeError(f"{where} has no type hint.")
        text_of_it = own_args.get(parameter.name) or class_args.get(parameter.name) or _annotated(hints[parameter.name])
        if not text_of_it:
            raise TypeError(f"{where} has no description: add `{parameter.name}: ...` under `Args:` in the docstring.")
        described[parameter.name] = text_of_it
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    adapter, properties = _read({part: hints[part] for part in described}, set(defaults), name)
    for part, schema in properties.items():
        schema["description"] = described[part]
        default = defaults.get(part)
        default = default.value if isinstance(default, Enum) else default
        if isinstance(default, (str, int, float, bool)):
            schema["default"] = default
    required = [part for part in described if part not in defaults]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Described(text, parameters, adapter)


def parse_docstring(doc: str, name: str) -> tuple[str, dict[str, str]]:
    """The text of a Google-style docstring before its sections, and the entries of ``Args:`` and ``Attributes:``.
    Raises TypeError: it cannot be read."""
    if not doc:
        return "", {}
    import docstring_parser

    doc, bare = inspect.cleandoc(doc), False
    if re.match(r"(Args|Arguments|Parameters):", doc):  # which the parser takes after a text only, and indented
        bare, doc = True, "-\n\n" + (doc if re.match(r".*\n\s", doc) else doc.replace("\n", "\n    "))
    try:
        parsed = docstring_parser.parse(doc, docstring_parser.DocstringStyle.GOOGLE)
    except docstring_parser.ParseError as error:
        raise TypeError(f"Tool {name!r} has a docstring that cannot be read as Google style: {error}") from error
    entries = {entry.arg_name.lstrip("*"): " ".join((entry.description or "").split()) for entry in parsed.params}
    return "" if bare else (parsed.description or "").strip(), entries


def _read(hints: dict[str, Any], optional: set[str], name: str) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """What reads arguments with these type hints, and the schema of each."""
    import pydantic
    import typing_extensions

    fields = {part: typing_extensions.NotRequired[hint] if part in optional else hint for part, hint in hints.items()}
    typed_dict: Any = typing_extensions.TypedDict  # not the class statement that a checker takes its call for
    arguments = typed_dict("Arguments", fields)
    arguments.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[Any] = pydantic.TypeAdapter(arguments)
        schema = adapter.json_schema(schema_generator=_generator())
    except (pydantic.errors.PydanticUserError, ValueError) as error:
        for part, hint in hints.items():
            try:
                pydantic.TypeAdapter(hint).json_schema()
            except (pydantic.errors.PydanticUserError, ValueError) as cause:
                said = str(cause).splitlines()[0]
                raise TypeError(
                    f"Tool {name!r}, parameter {part!r} has type {hint}, which has no schema ({said}). Use {_KNOWN}."
                ) from error
        raise TypeError(f"Tool {name!r}: {error}") from error
    return adapter, tidy(schema.get("properties", {}), schema.get("$defs", {}), name)


def _annotated(hint: Any) -> str:
    """The description in ``Annotated[type, "description"]``, or in a pydantic ``Field`` there; else empty."""
    texts = (extra if isinstance(extra, str) else getattr(extra, "description", None)
             for extra in getattr(hint, "__metadata__", ()))  # fmt: skip
    return next((text for text in texts if isinstance(text, str) and text), "")


def _generator() -> Any:
    """pydantic's maker of schemas, which here also reads what dataclasses and typed dicts say of their fields."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def sort(self, value: Any, parent_key: str | None = None) -> Any:
            return value  # in the order in which it was written

        def dataclass_schema(self, schema: Any) -> Any:
            return self._described(super().dataclass_schema(schema), schema["cls"])

        def typed_dict_schema(self, schema: Any) -> Any:
            made = super().typed_dict_schema(schema)
            return self._described(made, schema["cls"]) if schema.get("cls") else made

        def _described(self, made: Any, cls: type) -> Any:
            text, docs = parse_docstring(cls.__doc__ or "", cls.__name__)
            made.pop("description", None)
            if text and not text.startswith(f"{cls.__name__}("):  # written by dataclasses itself
                made = {"type": made.pop("type"), "description": text.split("\n\n")[0], **made}
            hints = typing.get_type_hints(cls, include_extras=True)
            for name, property in list(made.get("properties", {}).items()):
                field = getattr(cls, "__dataclass_fields__", {}).get(name)
                if field is not None and not field.init:
                    del made["properties"][name]
                metadata = field.metadata if field is not None else {}
                if said := _annotated(hints.get(name)) or metadata.get("description") or docs.get(name):
                    property["description"] = said
            return made

    return Generator


def tidy(node: Any, definitions: dict[str, Any], tool: str = "", inside: tuple[str, ...] = ()) -> Any:
    """A schema with references replaced by what they name, and without titles: models read it, not programs.
    Raises TypeError: it contains itself."""
    if isinstance(node, list):
        return [tidy(item, definitions, tool, inside) for item in node]
    if not isinstance(node, dict):
        return node
    name = str(node.get("$ref", "")).rpartition("/")[2]
    if name in inside:
        raise TypeError(f"Tool {tool!r}: {name} contains itself, so its schema would have no end.")
    if name in definitions:
        node = {**definitions[name], **{key: value for key, value in node.items() if key != "$ref"}}
        inside = (*inside, name)
    return {
        key: value if key in ("default", "enum", "const") else tidy(value, definitions, tool, inside)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }
