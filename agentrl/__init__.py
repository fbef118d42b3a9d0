"""agentrl: train language-model agents that act in many turns.

Everything a user writes against is named here and imported when first used; ``import agentrl`` itself
loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl import _gymnasium
from agentrl.on_demand import names_on_demand

if TYPE_CHECKING:
    from agentrl import rewards as rewards, spaces as spaces, tools as tools
    from agentrl.envs import wrappers as wrappers
    from agentrl.envs.builtin.prompt import PromptEnv as PromptEnv
    from agentrl.envs.core import Env as Env
    from agentrl.envs.multi_agent import MultiAgentEnv as MultiAgentEnv
    from agentrl.envs.registry import make as make, register as register, registered as registered
    from agentrl.envs.tool_env import ToolEnv as ToolEnv
    from agentrl.errors import (
        AgentRLError as AgentRLError,
        ConfigError as ConfigError,
        DataError as DataError,
        EnvError as EnvError,
        InfraError as InfraError,
    )
    from agentrl.runs import Run as Run, evaluate as evaluate, train as train
    from agentrl.tasks.dataset import load_tasks as load_tasks
    from agentrl.tools.base import Tool as Tool, ToolError as ToolError, ToolResult as ToolResult, tool as tool
    from agentrl.types import (
        Message as Message,
        StopReason as StopReason,
        Task as Task,
        ToolCall as ToolCall,
        Trajectory as Trajectory,
    )

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = names_on_demand(__name__)

_gymnasium.install()
