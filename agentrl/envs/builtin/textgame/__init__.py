"""Seeded text adventures: rooms, items, a chest, a locked door, and one thing to bring about."""

from __future__ import annotations

from typing import Any

__all__ = ["TextGameEnv"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from agentrl.envs.builtin.textgame.env import TextGameEnv

        return TextGameEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
