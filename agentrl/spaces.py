"""Gymnasium spaces of agent environments."""

from agentrl.envs.spaces import Unicode

__all__ = ["Unicode"]
