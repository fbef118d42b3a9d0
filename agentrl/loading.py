"""Finds user code by name: ``module:attribute`` or ``path/to/file.py:attribute``.

The same string works in every process of a run, so code travels as a name and is never pickled.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import tomllib
import types
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, did_you_mean

_lock = threading.Lock()


def is_spec(text: str) -> bool:
    """Whether ``text`` has the form of a spec, found or not."""
    return ":" in text.removeprefix("gym:")


def portable(spec: str) -> str:
    """``spec`` with a file's path made absolute, so that it means the same in every working directory."""
    location, separator, name = spec.rpartition(":")
    if separator and location.endswith(".py"):
        return f"{Path(location).expanduser().resolve()}:{name}"
    return spec


def portable_source(source: str) -> str:
    """Task data, a path or the name of a function, so that it means the same in every working directory."""
    if is_spec(source) and not Path(source).expanduser().exists():
        return portable(source)
    return str(Path(source).expanduser().absolute())


def load_object(spec: str, what: str = "object") -> Any:
    """The attribute that ``spec`` names.

    Args:
        spec: ``package.module:Name`` or ``path/to/file.py:Name``; the file's folder becomes importable.
        what: What is looked for, for error messages.

    Raises:
        ConfigError: Not of that form, or no such file, module or attribute (with the nearest name).
            Errors of the module's own code pass through.
    """
    location, separator, name = spec.rpartition(":")
    if not separator or not location or not name:
        raise ConfigError(f"{what} {spec!r}: expected module:Name or path/to/file.py:Name.")
    module = load_file(location, what) if location.endswith(".py") else load_module(location, what)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            hint = did_you_mean(part, [n for n in dir(value) if not n.startswith("_")])
            raise ConfigError(f"{what} {spec!r}: {location} has no {part!r}.{hint}")
        value = getattr(value, part)
    return value


def load_module(name: str, what: str) -> types.ModuleType:
    """Imports a module, which may lie in the working directory.
    Raises ConfigError: there is none of that name. Errors of its own code pass through."""
    # The `agentrl` command is a script elsewhere, so Python does not look where the person is.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ConfigError(f"{what}: no module {missing!r} can be imported (from {name!r}).") from error
        raise


class _Source(importlib.machinery.SourceFileLoader):
    """Reads the source each time. Python's cached bytecode knows a file by its second and size only, so an edit of the
    same length within a second would go unseen; nor is anything written beside the user's file."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_file(location: str, what: str = "file") -> types.ModuleType:
    """The module in a Python file, loaded once a process.
    Raises ConfigError: there is no such file. Errors of its own code pass through."""
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {str(path)!r}.")
    # One module a file, whatever path led to it; the name is the same in every process.
    name = f"agentrl_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module_spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
        if module_spec is None or module_spec.loader is None:
            raise ConfigError(f"{what}: {location!r} is not a Python file.")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def toml_beside(file: str, name: str) -> dict[str, Any]:
    """A TOML file of this package that lies beside the module ``file``."""
    return tomllib.loads(Path(file).with_name(name).read_text(encoding="utf-8"))
