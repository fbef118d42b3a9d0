"""Versions of this package, of what it stands on, and of the code around it."""

from __future__ import annotations

import importlib
import subprocess
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import ConfigError

DISTRIBUTION = "agentrl-toolkit"
"""The project's name on a package index; the import and the command are ``agentrl``."""

PACKAGES = (
    DISTRIBUTION,
    "gymnasium",
    "numpy",
    "torch",
    "megatron-core",
    "ray",
    "sglang",
    "sglang-router",
    "transformers",
    "transformer-engine",
)


def install_command(extra: str) -> str:
    """How to get what ``extra`` brings: from an index, or in a clone."""
    return f"pip install '{DISTRIBUTION}[{extra}]' (in a clone of it: pip install -e '.[{extra}]')"


def imported(name: str, what: str, extra: str) -> ModuleType:
    """An optional package, or a module of it. Raises ConfigError: ``what`` needs it, and how ``extra`` brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{what} needs the package {name.partition('.')[0]}: {install_command(extra)}") from error


def installed() -> dict[str, str]:
    """Package -> version, of those in :data:`PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path | str) -> dict[str, Any] | None:
    """``{"revision": ..., "dirty": bool | None}`` of the git checkout that holds ``folder``; None outside of one."""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(folder), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):  # no git, or a very large checkout: then it is not known
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    if revision is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changed is None else bool(changed)}
