"""The option table: what option dataclasses such as :class:`agentrl.config.Config` declare, as plain records."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.values import PathMark, Range

SINGULAR = {"env_args": "env-arg"}
"""Repeatable options whose flag is the singular of the field."""


@dataclass(frozen=True)
class Option:
    """One option. ``kind``: int, float, bool, str, choice, list, mapping, pairs or passthrough."""

    name: str
    group: str
    kind: str
    default: Any
    nullable: bool
    choices: tuple[str, ...]
    range: Range | None
    is_path: bool
    doc: str

    @property
    def flag(self) -> str:
        return "--" + SINGULAR.get(self.name, self.name.replace("_", "-"))

    @property
    def metavar(self) -> str:
        """What stands behind the flag in help; empty for switches."""
        if self.kind == "choice":
            return "{" + ",".join(self.choices) + "}"
        if self.kind == "str":
            return "PATH" if self.is_path else "TEXT"
        words = {"int": "INT", "float": "NUMBER", "list": "NAME", "mapping": "KEY=VALUE", "pairs": "NAME PATH"}
        return words.get(self.kind, "")


@functools.cache
def _attribute_docs(module: str) -> dict[tuple[str, str], str]:
    """``(class, field) -> docstring``, read from the module's source: Python keeps no attribute docstrings."""
    tree = ast.parse(Path(sys.modules[module].__file__).read_text(encoding="utf-8"))
    docs = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for stmt, follower in zip(cls.body, cls.body[1:], strict=False):
            if (
                isinstance(stmt, ast.AnnAssign)
                and isinstance(follower, ast.Expr)
                and isinstance(follower.value, ast.Constant)
            ):
                docs[cls.name, stmt.target.id] = " ".join(follower.value.value.split())
    return docs


def _unwrap(hint: Any) -> tuple[Any, bool, list[Any]]:
    """``(bare type, nullable, annotations)`` of a hint such as ``Annotated[int, Range(1)] | None``."""
    notes: list[Any] = []
    nullable = False
    while True:
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            notes += hint.__metadata__
            hint = hint.__origin__
        elif origin in (types.UnionType, typing.Union):
            nullable = True
            (hint,) = [a for a in typing.get_args(hint) if a is not type(None)]
        else:
            return hint, nullable, notes


def _option(cls: type, item: dataclasses.Field, hint: Any, doc: str) -> Option:
    bare, nullable, notes = _unwrap(hint)
    origin = typing.get_origin(bare)
    choices: tuple[str, ...] = ()
    if origin is typing.Literal:
        kind, choices = "choice", typing.get_args(bare)
    elif origin is dict:
        kind = "mapping" if item.name == "env_args" else "passthrough"
    elif origin is tuple:
        kind = "list" if typing.get_args(bare)[0] is str else "pairs"
    else:
        kind = bare.__name__
    default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
    return Option(
        name=item.name,
        group=(cls.__doc__ or "").strip().partition("\n")[0],
        kind=kind,
        default=default,
        nullable=nullable,
        choices=choices,
        range=next((n for n in notes if isinstance(n, Range)), None),
        is_path=any(isinstance(n, PathMark) for n in notes),
        doc=doc,
    )


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
            if item.name in own:
                table[item.name] = _option(cls, item, hints[item.name], docs[cls.__name__, item.name])
    return table
