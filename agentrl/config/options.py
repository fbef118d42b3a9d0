"""What one option is: its type, range, default and help, read from the dataclass that declares it, and how a value of
it is read from a flag's text or from a file."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
import os
import re
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

SINGULAR = {"env_args": "env-arg"}
"""Repeatable options whose flag is the singular of the field."""


@dataclass(frozen=True)
class Range:
    """Allowed interval of a number; an open end is excluded."""

    low: float
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        if value < self.low or (self.low_open and value == self.low):
            return False
        return self.high is None or value < self.high or (value == self.high and not self.high_open)

    def __str__(self) -> str:
        if self.high is None:
            return f"{'more than' if self.low_open else 'at least'} {self.low:g}"
        open_ends = "above" if self.low_open else "from", "to below" if self.high_open else "to"
        return f"{open_ends[0]} {self.low:g} {open_ends[1]} {self.high:g}"


class PathMark:
    """Marks a text option as a path on disk."""


PathText = Annotated[str, PathMark]
Positive = Annotated[int, Range(low=1)]
Count = Annotated[int, Range(low=0)]
Seconds = Annotated[float, Range(low=0.0, low_open=True)]
NonNegative = Annotated[float, Range(low=0.0)]
Probability = Annotated[float, Range(low=0.0, high=1.0)]

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_UNITS = {"k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "pairs": "pairs of name and path",
    "mapping": "a table of names and values",
    "passthrough": "a table of names and values",
}


def json_or_text(text: str) -> Any:
    """JSON where it is JSON (without NaN and Infinity), else the text itself."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text


def _scalar(kind: str, value: Any, text: bool) -> Any:
    """A whole float is taken as int, an int as float. Text of a file is never read as a number: a quoted number is an
    error there, and not a guess. Raises ValueError."""
    if text and kind == "bool":
        value = _WORDS.get(value.strip().lower())
    elif text and kind in ("int", "float"):
        if kind == "int" and (unit := re.fullmatch(r"(\d+)(k|M|Ki|Mi)", value)):
            value = int(unit[1]) * _UNITS[unit[2]]
        try:
            value = int(value)
        except ValueError:
            value = float(value)
    if kind in ("bool", "str"):
        if isinstance(value, bool if kind == "bool" else str):
            return value
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        if kind == "float":
            return float(value)
        if value == int(value):
            return int(value)
    raise ValueError(value)


@dataclass(frozen=True)
class Option:
    """One option, of ours or of another package.

    ``kind``: int, float, bool, str, list (of ``element``), mapping (``KEY=VALUE``), pairs or passthrough; of other
    packages also json, any (unchecked) and opaque (cannot be written as text).
    """

    name: str
    kind: str
    default: Any = None
    nullable: bool = False
    choices: tuple[Any, ...] = ()
    element: str = "str"
    range: Range | None = None
    is_path: bool = False
    group: str = ""
    doc: str = ""

    @property
    def flag(self) -> str:
        return "--" + SINGULAR.get(self.name, self.name.replace("_", "-"))

    @property
    def metavar(self) -> str:
        """What stands behind the flag in help; empty for switches."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        text = "PATH" if self.is_path else "TEXT"
        words = {"int": "INT", "float": "NUMBER", "list": "NAME", "mapping": "KEY=VALUE", "pairs": "NAME PATH"}
        return {**words, "str": text}.get(self.kind, "")

    @property
    def expected(self) -> str:
        """What a value has to be, in words."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.kind == "list":
            return f"a list of {_EXPECTED[self.element]}"
        return "a path" if self.is_path else _EXPECTED.get(self.kind, "a value")

    def read(self, value: Any, *, text: bool = False) -> Any:
        """``value``, from a file or as one word of a command line (``text``), as the option holds it; the home folder
        for ``~`` in a path.
        Raises ValueError: it is of another type, or no choice."""
        if self.nullable and (value is None or (text and str(value).lower() in ("none", "null"))):
            return None
        if self.kind in ("json", "any"):
            return json_or_text(value) if text else value
        if self.kind == "list":
            if not isinstance(value, (list, tuple)):
                raise ValueError(value)
            return [_scalar(self.element, item, text) for item in value]
        if self.kind == "pairs":
            pairs = list(value.items() if isinstance(value, dict) else value)
            if not all(isinstance(p, (list, tuple)) and [type(x) for x in p] == [str, str] for p in pairs):
                raise ValueError(value)
            return tuple((name, path) for name, path in pairs)
        if self.kind in ("mapping", "passthrough"):
            if not isinstance(value, dict):
                raise ValueError(value)
            return {str(key): item for key, item in value.items()}
        found = _scalar(self.kind, value, text)
        if self.choices and found not in self.choices:
            raise ValueError(value)
        return os.path.expanduser(found) if self.is_path else found


def described(hint: Any) -> tuple[dict[str, Any], list[Any]]:
    """What a type hint says of an option (``kind``, ``nullable``, ``choices``, ``element``), and its annotations."""
    notes: list[Any] = []
    nullable = False
    while True:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            hint, *more = args
            notes += more
        elif origin in (types.UnionType, typing.Union):
            real = [a for a in args if a is not type(None)]
            nullable = nullable or len(real) < len(args)
            if len(real) > 1:
                settable = any(described(a)[0]["kind"] != "opaque" for a in real)
                return {"kind": "json" if settable else "opaque", "nullable": nullable}, notes
            (hint,) = real
        else:
            break
    found: dict[str, Any] = {"nullable": nullable}
    if origin is typing.Literal:
        kinds = {type(a).__name__ for a in args if a is not None}
        found |= {
            "kind": kinds.pop() if len(kinds) == 1 else "json",
            "choices": tuple(a for a in args if a is not None),
        }
        found["nullable"] = nullable or None in args
    elif origin in (list, tuple) or hint is list:
        element = described(args[0])[0]["kind"] if args else "str"
        of_pairs = element == "list"
        found |= {"kind": "pairs" if of_pairs else "list", "element": element if element in ("int", "float") else "str"}
    elif origin is dict or hint in (dict, Any):
        found["kind"] = "json"
    else:
        found["kind"] = hint.__name__ if hint in (int, float, bool, str) else "opaque"
    return found, notes


@functools.cache
def _attribute_docs(module: str) -> dict[tuple[str, str], str]:
    """``(class, field) -> docstring``, read from the module's source: Python keeps no attribute docstrings."""
    tree = ast.parse(Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8"))
    docs = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, doc in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                docs[cls.name, ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return docs


@functools.cache
def options(config_class: type) -> dict[str, Option]:
    """Field name -> :class:`Option` of ``config_class``, group by group, in the order of declaration."""
    table = {}
    for cls in reversed(config_class.__mro__):
        own = cls.__dict__.get("__annotations__", {})
        if not dataclasses.is_dataclass(cls) or not own:
            continue
        docs = _attribute_docs(cls.__module__)
        hints = typing.get_type_hints(cls, include_extras=True)
        for item in dataclasses.fields(cls):
            if item.name not in own:
                continue
            found, notes = described(hints[item.name])
            if found["kind"] == "json":
                found["kind"] = "mapping" if item.name == "env_args" else "passthrough"
            table[item.name] = Option(
                name=item.name,
                group=(cls.__doc__ or "").strip().partition("\n")[0],
                default=item.default if item.default_factory is dataclasses.MISSING else item.default_factory(),
                range=next((n for n in notes if isinstance(n, Range)), None),
                is_path=PathMark in notes,
                doc=docs[cls.__name__, item.name],
                **found,
            )
    return table
