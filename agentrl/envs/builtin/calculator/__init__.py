"""Arithmetic word problems, solved with a calculator."""

from agentrl.envs.builtin.calculator.env import CalculatorEnv

__all__ = ["CalculatorEnv"]
