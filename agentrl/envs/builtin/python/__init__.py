"""Problems that are solved by writing and running Python."""

from __future__ import annotations

from typing import Any

__all__ = ["PythonEnv"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from agentrl.envs.builtin.python.env import PythonEnv

        return PythonEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
