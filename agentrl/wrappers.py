"""Wrappers around agent environments."""

from agentrl.envs.wrapper import Wrapper

__all__ = ["Wrapper"]
