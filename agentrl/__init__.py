"""agentrl: train language-model agents that act in many turns.

Everything a user writes against is named here and imported when first used; ``import agentrl`` itself
loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl import _gymnasium
from agentrl.on_demand import names_on_demand

if TYPE_CHECKING:
    from agentrl import rewards as rewards
    from agentrl import spaces as spaces
    from agentrl import tools as tools
    from agentrl.envs import wrappers as wrappers
    from agentrl.envs.builtin.prompt import PromptEnv as PromptEnv
    from agentrl.envs.core import Env as Env
    from agentrl.envs.multi_agent import MultiAgentEnv as MultiAgentEnv
    from agentrl.envs.registry import make as make
    from agentrl.envs.registry import register as register
    from agentrl.envs.registry import registered as registered
    from agentrl.envs.tool_env import ToolEnv as ToolEnv
    from agentrl.errors import (
        AgentRLError as AgentRLError,
    )
    from agentrl.errors import (
        ConfigError as ConfigError,
    )
    from agentrl.errors import (
        DataError as DataError,
    )
    from agentrl.errors import (
        EnvError as EnvError,
    )
    from agentrl.errors import (
        InfraError as InfraError,
    )
    from agentrl.tasks.dataset import load_tasks as load_tasks
    from agentrl.tools.base import Tool as Tool
    from agentrl.tools.base import ToolError as ToolError
    from agentrl.tools.base import ToolResult as ToolResult
    from agentrl.tools.base import tool as tool
    from agentrl.types import (
        Message as Message,
    )
    from agentrl.types import (
        StopReason as StopReason,
    )
    from agentrl.types import (
        Task as Task,
    )
    from agentrl.types import (
        ToolCall as ToolCall,
    )
    from agentrl.types import (
        Trajectory as Trajectory,
    )

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = names_on_demand(__name__)

_gymnasium.install()
