"""Tools: what a model may call, how calls are written, and how they are run."""

from agentrl.tools.base import FunctionTool, Tool, ToolError, ToolErrorType, ToolResult, tool
from agentrl.tools.execution import close_tools, run_call, run_calls
from agentrl.tools.parsers import Parsed, Parser, detect_format, get_parser

__all__ = [
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
]
