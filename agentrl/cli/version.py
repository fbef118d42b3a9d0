"""``agentrl version``."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from agentrl.versions import PACKAGES, installed


def usage(argv: Sequence[str]) -> str:
    """Help text."""
    return "usage: agentrl version\n\nPrint the versions of agentrl and of what it stands on."


def run(argv: Sequence[str]) -> int:
    """Print one line a package."""
    versions = installed()
    for name in PACKAGES:
        print(f"{name:<20} {versions.get(name, 'not installed')}")
    print(f"{'python':<20} {platform.python_version()}")
    return 0
