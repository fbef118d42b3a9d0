"""``agentrl version``."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

PACKAGES = (
    "gymnasium",
    "torch",
    "megatron-core",
    "mbridge",
    "ray",
    "sglang",
    "sglang-router",
    "transformers",
    "transformer-engine",
)


def usage(argv: Sequence[str]) -> str:
    """Help text."""
    return "usage: agentrl version\n\nPrint the versions of agentrl and of what it stands on."


def versions() -> dict[str, str]:
    """Package -> installed version, or ``not installed``."""
    found = {}
    for name in ("agentrl", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def run(argv: Sequence[str]) -> int:
    """Print one line a package."""
    for name, version in {**versions(), "python": platform.python_version()}.items():
        print(f"{name:<20} {version}")
    return 0
