"""Options that are not ours: ``--sglang-*`` for the server, Megatron's own names for the trainer.

Names, types and defaults are read from the sources of the installed packages, which are not imported: that takes 8 s
each, and a flag must be refused before. Where a package is absent, its options are taken unchecked, and it refuses what
is wrong itself. What the run decides is refused with the flag that decides it.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.names import nearest
from agentrl.config.options import Option, described
from agentrl.errors import ConfigError
from agentrl.loading import toml_beside

MEGATRON_CLASSES = {
    "ModelParallelConfig": "core/model_parallel_config.py",
    "TransformerConfig": "core/transformer/transformer_config.py",
    "MLATransformerConfig": "core/transformer/transformer_config.py",
    "OptimizerConfig": "core/optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "core/distributed/distributed_data_parallel_config.py",
}

_TABLES = toml_beside(__file__, "sglang_options.toml")
SGLANG_OWNED: dict[str, str] = _TABLES["owned"]
"""Server arguments that the run itself sets, with what to do in their place."""
SGLANG_CODE: dict[str, str] = _TABLES["code"]
"""Server arguments by which code of others is run, and how."""


def remote_code(sglang: Mapping[str, Any], allowed: bool) -> Iterator[str]:
    """A problem for each argument of the server that runs code of others, unless that is ``allowed``."""
    for name, value in sglang.items():
        how = SGLANG_CODE.get(name.replace("-", "_"))
        if how is not None and value not in (False, None) and not allowed:
            flag = f"--sglang-{name.replace('_', '-')}"
            yield f"{flag}: {how}. Give --allow-remote-code too if you trust where it comes from."


def package_folder(name: str) -> Path | None:
    """Folder of a top-level package, without importing it."""
    if places := getattr(sys.modules.get(name), "__path__", None):
        return Path(list(places)[0])
    try:
        spec = importlib.machinery.PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(list(spec.submodule_search_locations)[0]) if spec and spec.submodule_search_locations else None


class _Unknown:
    """What a name of the other package stands for here. Whatever is done with it gives it again."""

    def __init__(self, name: str = ""):
        self.name = name

    def __getattr__(self, name: str) -> _Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unknown(name)

    def __call__(self, *args: Any, **kwargs: Any) -> _Unknown:
        return self

    __getitem__ = __add__ = __radd__ = __call__

    def __or__(self, other: Any) -> Any:
        return typing.Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return typing.Union[other, self]  # noqa: UP007


class _Names(dict):
    """Names of typing and of Python's types; any other is :class:`_Unknown`."""

    def __missing__(self, name: str) -> Any:
        known = getattr(typing, name, None) or {t.__name__: t for t in (int, float, bool, str, list, dict, tuple)}.get(
            name
        )
        return known if name != "Callable" and known is not None else _Unknown(name)


def _evaluated(node: ast.expr | None, **names: Any) -> Any:
    """The value of an expression of another package's source, with its own names unknown."""
    if node is None:
        return None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation in quotes
        node = ast.parse(node.value, mode="eval").body
    return eval(compile(ast.Expression(node), "<option>", "eval"), {"__builtins__": {}}, _Names(names))


def _fields(file: Path, wanted: str | None = None) -> Iterator[tuple[str, ast.AnnAssign]]:
    """Annotated public fields of class ``wanted`` in ``file``, of all its classes when None."""
    for cls in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
        if isinstance(cls, ast.ClassDef) and wanted in (None, cls.name):
            for stmt in cls.body:
                if isinstance(stmt, ast.AnnAssign) and not (name := getattr(stmt.target, "id", "_")).startswith("_"):
                    yield name, stmt


@functools.cache
def megatron_fields() -> dict[str, Option] | None:
    """Field name -> option over Megatron-core's config dataclasses; None when megatron-core is not installed."""
    table: dict[str, Option] = {}
    folder = package_folder("megatron")
    if folder is None:
        return None
    for cls, path in MEGATRON_CLASSES.items():
        for name, stmt in _fields(folder / path, cls):
            value = stmt.value
            if isinstance(value, ast.Call):  # field(default=...)
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            default = value.value if isinstance(value, ast.Constant) else None
            table.setdefault(name, Option(name, default=default, **described(_evaluated(stmt.annotation))[0]))
    return table or None


@functools.cache
def sglang_fields() -> dict[str, Option] | None:
    """Flag of SGLang's server, without dashes in front -> option; aliases lead to the same option.

    The option's ``name`` is the server's own flag with underscores. None when sglang is not installed.
    """
    folder = package_folder("sglang")
    if folder is None:
        return None
    table: dict[str, Option] = {}
    server_args = folder / "srt" / "server_args.py"
    for file in (server_args, *sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py"))):
        for name, stmt in _fields(file, "ServerArgs" if file == server_args else None):
            table = _server_flags(name, stmt.annotation) | table
    for call in ast.walk(ast.parse(server_args.read_text(encoding="utf-8"))) if server_args.is_file() else ():
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument" and call.args:
            words = {word.arg: _evaluated(word.value) if word.arg == "type" else word.value for word in call.keywords}
            switch = "store_true" in (action := ast.unparse(words.get("action", call.func))) or "StoreTrue" in action
            flag, kind = (
                ast.literal_eval(call.args[0]).lstrip("-"),
                "bool" if switch else described(words.get("type", str))[0]["kind"],
            )
            table = {flag: Option(flag.replace("-", "_"), "json" if kind == "opaque" else kind)} | table
    return table if len(table) > 50 else None


def _server_flags(name: str, annotation: ast.expr) -> dict[str, Option]:
    """Flags of one attribute ``A[type, Arg(...)]``; none where that says so."""
    found, notes = described(_evaluated(annotation, A=typing.Annotated, Arg=lambda **words: words))
    about = next((note for note in notes if isinstance(note, dict)), {})
    if about.get("no_cli") or any(isinstance(note, _Unknown) for note in notes):
        return {}
    flags = [(about.get("cli_name") or name).lstrip("-").replace("_", "-")]
    flags += [alias.lstrip("-") for alias in about.get("aliases") or ()]
    if isinstance(choices := about.get("choices"), (list, tuple)):
        found["choices"] = tuple(choices)
    if found["kind"] == "opaque":
        found["kind"] = "json"
    table = dict.fromkeys(flags, Option(flags[0].replace("-", "_"), **found))
    if getattr(about.get("action"), "name", "") == "BooleanOptionalAction":
        table[f"no-{flags[0]}"] = Option(f"no_{flags[0].replace('-', '_')}", "bool")
    return table


def sglang_field(given: str, name: str) -> Option:
    """The server option behind ``--sglang-<name>``; one of kind ``any`` when sglang is not installed.
    Raises ConfigError: the run sets it itself, or SGLang has no such option."""
    table, flag = sglang_fields(), name.replace("_", "-")
    field = (table or {}).get(flag) or Option(flag.replace("-", "_"), "any")
    if field.name in SGLANG_OWNED:
        raise ConfigError(f"{given} cannot be set: {SGLANG_OWNED[field.name]}.")
    if table is not None and flag not in table:
        close = nearest(flag, table)
        hint = f" Did you mean --sglang-{close}?" if close else ""
        raise ConfigError(f"{given}: SGLang's server has no option {flag!r}.{hint}")
    return field
