"""Arithmetic word problems, solved with a calculator."""

from __future__ import annotations

from typing import Any

__all__ = ["CalculatorEnv"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from agentrl.envs.builtin.calculator.env import CalculatorEnv

        return CalculatorEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
