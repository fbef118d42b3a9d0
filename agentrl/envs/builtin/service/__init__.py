"""Customer service of a shop: a database, tools that read and change it, rules to follow, and a customer."""

from __future__ import annotations

from typing import Any

__all__ = ["ServiceEnv"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from agentrl.envs.builtin.service.env import ServiceEnv

        return ServiceEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
