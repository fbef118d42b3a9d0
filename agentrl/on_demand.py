"""Packages whose names are imported when first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names_on_demand(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and the names of a package.

    The names are those that it imports under ``if TYPE_CHECKING:``, where type checkers and people read them too.

    Args:
        package: Its ``__name__``; called from its ``__init__``.
    """
    module = sys.modules[package]
    homes: dict[str, str] = {}
    for statement in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            imports = [part for part in statement.body if isinstance(part, ast.ImportFrom)]
            homes |= {alias.name: str(part.module) for part in imports for alias in part.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name]) if homes[name] != package else None
        value = getattr(home, name, None) or importlib.import_module(f"{homes[name]}.{name}")
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *homes})

    return load, names, list(homes)
