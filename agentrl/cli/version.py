"""``agentrl version``."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from agentrl.versions import PACKAGES, installed


def run(argv: Sequence[str]) -> int:
    """Print one line a package."""
    versions = installed()
    for name in PACKAGES:
        print(f"{name:<20} {versions.get(name, 'not installed')}")
    print(f"{'python':<20} {platform.python_version()}")
    return 0
