"""Environments: the contract, the tool environment, the registry."""

from agentrl.envs.core import Env
from agentrl.envs.registry import find, make, register, registered
from agentrl.envs.tool_env import ToolEnv
from agentrl.spaces import Unicode

__all__ = ["Env", "ToolEnv", "Unicode", "find", "make", "register", "registered"]
