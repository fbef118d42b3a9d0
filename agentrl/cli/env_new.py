"""``agentrl env new NAME``: a package to begin from."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from agentrl.config.layers import load_options
from agentrl.config.options import PathText
from agentrl.errors import ConfigError

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{module}/__init__.py": "init.py",
    "{module}/env.py": "env.py",
    "tests/test_{module}.py": "test_env.py",
}
"""File of the package to its template."""

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*\Z")


@dataclass(frozen=True, kw_only=True)
class Options:
    """New environment"""

    dir: PathText = "."
    """Folder in which the package's folder NAME is made."""


def run(name: str, argv: Sequence[str]) -> int:
    """Write the package; returns the exit code."""
    given = load_options(Options, argv)
    folder = write_package(name, Path(given.dir))
    module = folder.name.replace("-", "_")
    print(f"wrote {folder}")
    for relative in FILES:
        print(f"  {relative.format(module=module)}")
    check = f"agentrl env check {module}/env.py:{_class_name(name)}"
    print(f"\nnext:\n  cd {folder}\n  {check}\n  pip install -e '.[test]' && python -m pytest")
    return 0


def write_package(name: str, parent: Path) -> Path:
    """The package ``name`` in a new folder of that name.
    Raises ConfigError: the name cannot be a package's, or the folder is there already."""
    _check_name(name)
    folder = parent / name
    words = {"name": name, "module": name.replace("-", "_"), "cls": _class_name(name)}
    if folder.exists():
        raise ConfigError(f"{folder} exists already; nothing was written. Give another name, or another --dir.")
    templates = resources.files("agentrl") / "assets" / "new_env"
    for relative, template in FILES.items():
        text = Template((templates / f"{template}.txt").read_text(encoding="utf-8")).substitute(words)
        file = folder / relative.format(module=words["module"])
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror or error}. Give another --dir.") from error
    return folder


def _check_name(name: str) -> None:
    from agentrl.envs.registry import registered

    module = name.replace("-", "_")
    if not _NAME.match(name):
        raise ConfigError(f"{name!r}: a name of lower-case letters, digits, - and _ is expected, such as warehouse.")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module in ("agentrl", "tests"):
        raise ConfigError(f"{name!r} is a name of Python's own or of agentrl; choose another.")
    there = importlib.util.find_spec(module)
    if there is not None and there.origin is not None:
        raise ConfigError(
            f"a package {module!r} is installed already, and this one would hide it; choose another name."
        )
    if name in registered():
        raise ConfigError(f"there is an environment {name!r} already; choose another name.")


def _class_name(name: str) -> str:
    """``my_env`` and ``my`` are both ``MyEnv``."""
    return "".join(part.capitalize() for part in re.split(r"[_-]", name)).removesuffix("Env") + "Env"
