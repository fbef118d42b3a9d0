"""Versions of this package and of what it stands on."""

from __future__ import annotations

from importlib import metadata

PACKAGES = (
    "agentrl",
    "gymnasium",
    "numpy",
    "torch",
    "megatron-core",
    "mbridge",
    "ray",
    "sglang",
    "sglang-router",
    "transformers",
    "transformer-engine",
)


def installed() -> dict[str, str]:
    """Package -> version, of those in :data:`PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
