"""Names and types of SGLang's and Megatron's own options, read from their installed sources.

The sources are parsed, not imported: importing either takes seconds and torch, and a flag must be refused
before that. What cannot be found (package absent, or laid out in another way) comes back as None, and then
the option is handed on unchecked and refused, if wrong, by the package itself.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MEGATRON_CLASSES = {
    "ModelParallelConfig": "core/model_parallel_config.py",
    "TransformerConfig": "core/transformer/transformer_config.py",
    "MLATransformerConfig": "core/transformer/transformer_config.py",
    "OptimizerConfig": "core/optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "core/distributed/distributed_data_parallel_config.py",
}


@dataclass(frozen=True)
class ForeignField:
    """One option of another package. ``kind``: int, float, bool, str, list, json or opaque (not settable as text)."""

    name: str
    kind: str
    element: str = "str"
    choices: tuple = ()
    nullable: bool = False
    default: Any = None
    """Where it is a literal."""


def package_folder(name: str) -> Path | None:
    """Folder of a top-level package, without importing it."""
    if name in sys.modules and getattr(sys.modules[name], "__path__", None):
        return Path(list(sys.modules[name].__path__)[0])
    try:
        spec = importlib.machinery.PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(list(spec.submodule_search_locations)[0])


def _base(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _field_of(name: str, node: ast.expr) -> ForeignField:
    """The field with annotation ``node``; what is neither a scalar, list, mapping nor Literal is opaque."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(name, _or_members(node))
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        base = _base(node.value)
        if base == "Optional":
            return _union(name, [*inner, ast.Constant(None)])
        if base == "Union":
            return _union(name, inner)
        if base == "Literal":
            values = tuple(e.value for e in inner if isinstance(e, ast.Constant))
            kinds = {type(v).__name__ for v in values if v is not None}
            kind = kinds.pop() if len(kinds) == 1 else "json"
            return ForeignField(name, kind, choices=tuple(v for v in values if v is not None), nullable=None in values)
        if base in ("List", "list", "Tuple", "tuple", "Sequence"):
            element = _field_of(name, inner[0]).kind
            return ForeignField(name, "list", element=element if element in ("int", "float") else "str")
        if base in ("Dict", "dict"):
            return ForeignField(name, "json")
        return ForeignField(name, "opaque")
    kinds = {
        "int": "int",
        "float": "float",
        "bool": "bool",
        "str": "str",
        "dict": "json",
        "Any": "json",
        "list": "list",
    }
    return ForeignField(name, kinds.get(_base(node), "opaque"))


def _or_members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [*_or_members(node.left), *_or_members(node.right)]
    return [node]


def _union(name: str, members: list[ast.expr]) -> ForeignField:
    real = [m for m in members if not (isinstance(m, ast.Constant) and m.value is None)]
    fields = [_field_of(name, m) for m in real]
    nullable = len(real) < len(members) or any(f.nullable for f in fields)
    if len(fields) == 1:
        only = fields[0]
        return ForeignField(name, only.kind, only.element, only.choices, nullable)
    settable = any(f.kind != "opaque" for f in fields)
    return ForeignField(name, "json" if settable else "opaque", nullable=nullable)


def _class_fields(path: Path, wanted: str | None = None) -> dict[str, ast.AnnAssign]:
    """Annotated fields of class ``wanted`` in ``path`` (of all top-level classes when None)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, ast.AnnAssign] = {}
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef) and wanted in (None, cls.name):
            for stmt in cls.body:
                if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
                    found[stmt.target.id] = stmt
    return found


@functools.cache
def megatron_fields() -> dict[str, ForeignField] | None:
    """Field name -> type over Megatron-core's config dataclasses; None when megatron-core is not installed."""
    folder = package_folder("megatron")
    if folder is None or not (folder / "core").is_dir():
        return None
    table: dict[str, ForeignField] = {}
    for cls, path in MEGATRON_CLASSES.items():
        if not (folder / path).is_file():
            continue
        for name, stmt in _class_fields(folder / path, cls).items():
            if not name.startswith("_"):
                table.setdefault(name, replace(_field_of(name, stmt.annotation), default=_default(stmt.value)))
    return table or None


def _default(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):  # field(default=...)
        node = next((word.value for word in node.keywords if word.arg == "default"), None)
    return None if node is None else _literal(node)


def _sglang_entry(name: str, stmt: ast.AnnAssign) -> dict[str, ForeignField]:
    """Flags of one annotated attribute ``A[type, Arg(...)]`` or ``Annotated[...]``; empty if it has none."""
    node = stmt.annotation
    flags = [name.replace("_", "-")]
    choices: tuple = ()
    negative = None
    if (
        isinstance(node, ast.Subscript)
        and _base(node.value) in ("A", "Annotated")
        and isinstance(node.slice, ast.Tuple)
    ):
        node, *notes = node.slice.elts
        for call in (n for n in notes if isinstance(n, ast.Call)):
            if _base(call.func) != "Arg":
                return {}
            for word in call.keywords:
                value = _literal(word.value)
                if word.arg == "no_cli" and value:
                    return {}
                if word.arg == "cli_name" and value:
                    flags[0] = value.lstrip("-")
                if word.arg == "aliases" and value:
                    flags += [alias.lstrip("-") for alias in value]
                if word.arg == "action" and _base(word.value) == "BooleanOptionalAction":
                    negative = f"no-{flags[0]}"
                if word.arg == "choices" and value:
                    choices = tuple(value)
    field = _field_of(name, node)
    kind = "json" if field.kind == "opaque" else field.kind
    entry = ForeignField(_key(flags[0]), kind, field.element, choices or field.choices, field.nullable)
    table = dict.fromkeys(flags, entry)
    if negative:
        table[negative] = ForeignField(_key(negative), "bool")
    return table


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _added_arguments(path: Path) -> dict[str, ForeignField]:
    """Flags registered by hand, ``parser.add_argument("--name", type=..., action=...)``."""
    table = {}
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(call, ast.Call) and _base(call.func) == "add_argument" and call.args):
            continue
        flag = _literal(call.args[0])
        if isinstance(flag, str) and flag.startswith("--"):
            words = {word.arg: word.value for word in call.keywords}
            action = words.get("action", ast.Constant(None))
            switch = _literal(action) == "store_true" or "StoreTrue" in _base(action)
            kind = _base(words["type"]) if "type" in words else "str"
            kind = "bool" if switch else kind if kind in ("int", "float", "str") else "json"
            table[flag.lstrip("-")] = ForeignField(_key(flag), kind)
    return table


def _literal(node: ast.expr):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


@functools.cache
def sglang_fields() -> dict[str, ForeignField] | None:
    """Flag of SGLang's server, without dashes in front -> option; aliases lead to the same option.

    The option's ``name`` is the server's own flag with underscores. None when sglang is not installed.
    """
    folder = package_folder("sglang")
    if folder is None:
        return None
    table: dict[str, ForeignField] = {}
    sources = [(folder / "srt" / "server_args.py", "ServerArgs")]
    sources += [(path, None) for path in sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py"))]
    for path, wanted in sources:
        if not path.is_file():
            continue
        for name, stmt in _class_fields(path, wanted).items():
            if not name.startswith("_"):
                table = _sglang_entry(name, stmt) | table
    server_args = sources[0][0]
    if server_args.is_file():
        table = _added_arguments(server_args) | table
    return table if len(table) > 50 else None
