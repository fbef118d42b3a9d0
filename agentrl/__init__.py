"""agentrl: train language-model agents that act in many turns.

Everything a user writes against is named here and imported when first used; ``import agentrl`` itself
loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl import _gymnasium

if TYPE_CHECKING:
    from agentrl import rewards, spaces, tools
    from agentrl.envs import wrappers
    from agentrl.envs.builtin.prompt import PromptEnv
    from agentrl.envs.core import Env
    from agentrl.envs.multi_agent import MultiAgentEnv
    from agentrl.envs.registry import make, register, registered
    from agentrl.envs.tool_env import ToolEnv
    from agentrl.errors import AgentRLError, ConfigError, DataError, EnvError, InfraError
    from agentrl.tasks.dataset import load_tasks
    from agentrl.tools.base import Tool, ToolError, ToolResult, tool
    from agentrl.types import Message, StopReason, Task, ToolCall, Trajectory

__version__ = "0.1.0"

_HOME = {
    "AgentRLError": "agentrl.errors",
    "ConfigError": "agentrl.errors",
    "DataError": "agentrl.errors",
    "Env": "agentrl.envs.core",
    "EnvError": "agentrl.errors",
    "InfraError": "agentrl.errors",
    "Message": "agentrl.types",
    "MultiAgentEnv": "agentrl.envs.multi_agent",
    "PromptEnv": "agentrl.envs.builtin.prompt",
    "StopReason": "agentrl.types",
    "Task": "agentrl.types",
    "Tool": "agentrl.tools.base",
    "ToolCall": "agentrl.types",
    "ToolEnv": "agentrl.envs.tool_env",
    "ToolError": "agentrl.tools.base",
    "ToolResult": "agentrl.tools.base",
    "Trajectory": "agentrl.types",
    "load_tasks": "agentrl.tasks.dataset",
    "make": "agentrl.envs.registry",
    "register": "agentrl.envs.registry",
    "registered": "agentrl.envs.registry",
    "tool": "agentrl.tools.base",
}
_MODULES = {
    "rewards": "agentrl.rewards",
    "spaces": "agentrl.spaces",
    "tools": "agentrl.tools",
    "wrappers": "agentrl.envs.wrappers",
}

__all__ = [
    "AgentRLError",
    "ConfigError",
    "DataError",
    "Env",
    "EnvError",
    "InfraError",
    "Message",
    "MultiAgentEnv",
    "PromptEnv",
    "StopReason",
    "Task",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "Trajectory",
    "load_tasks",
    "make",
    "register",
    "registered",
    "rewards",
    "spaces",
    "tool",
    "tools",
    "wrappers",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_gymnasium.install()
