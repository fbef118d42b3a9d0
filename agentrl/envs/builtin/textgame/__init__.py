"""Seeded text adventures: rooms, items, a chest, a locked door, and one thing to bring about."""

from agentrl.envs.builtin.textgame.env import TextGameEnv

__all__ = ["TextGameEnv"]
