"""Tools: what a model may call, how calls are written, and how they are run.

The built-in tools are imported when first used, since some need packages of the extra ``tools``.
"""

from typing import TYPE_CHECKING

from agentrl.concurrency.backend import Backend
from agentrl.on_demand import names_on_demand
from agentrl.tools.base import FunctionTool, Tool, ToolError, ToolErrorType, ToolResult, tool
from agentrl.tools.execution import close_tools, run_call, run_calls
from agentrl.tools.formats import Parsed, Parser, detect_format, get_parser

if TYPE_CHECKING:
    from agentrl.tools.builtin.calculator import CalculatorTool as CalculatorTool
    from agentrl.tools.builtin.fetch import FetchTool as FetchTool
    from agentrl.tools.builtin.files import FilesTool as FilesTool
    from agentrl.tools.builtin.python import PythonTool as PythonTool
    from agentrl.tools.builtin.search import SearchTool as SearchTool
    from agentrl.tools.definitions import OpenAITool as OpenAITool
    from agentrl.tools.definitions import from_openai as from_openai
    from agentrl.tools.definitions import to_openai as to_openai
    from agentrl.tools.mcp import mcp_tools as mcp_tools

__getattr__, __dir__, _on_demand = names_on_demand(__name__)
__all__ = [
    "Backend",
    "FunctionTool",
    "Parsed",
    "Parser",
    "Tool",
    "ToolError",
    "ToolErrorType",
    "ToolResult",
    "close_tools",
    "detect_format",
    "get_parser",
    "run_call",
    "run_calls",
    "tool",
    *_on_demand,
]
