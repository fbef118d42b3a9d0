"""Customer service of a shop: a database, tools that read and change it, rules to follow, and a customer."""

from agentrl.envs.builtin.service.env import ServiceEnv

__all__ = ["ServiceEnv"]
