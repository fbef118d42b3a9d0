"""Tools: what a model may call, how calls are written, and how they are run.

The built-in tools are imported when first used, since some need packages of the extra ``tools``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.tools.base import FunctionTool, Tool, ToolError, ToolErrorType, ToolResult, tool
from agentrl.tools.execution import close_tools, run_call, run_calls
from agentrl.tools.formats import Parsed, Parser, detect_format, get_parser

if TYPE_CHECKING:
    from agentrl.tools.builtin.calculator import CalculatorTool
    from agentrl.tools.builtin.fetch import FetchTool
    from agentrl.tools.builtin.files import FilesTool
    from agentrl.tools.builtin.python import PythonTool
    from agentrl.tools.builtin.search import SearchTool
    from agentrl.tools.definitions import OpenAITool, from_openai, to_openai
    from agentrl.tools.mcp import mcp_tools

_HOME = {
    "CalculatorTool": "agentrl.tools.builtin.calculator",
    "FetchTool": "agentrl.tools.builtin.fetch",
    "FilesTool": "agentrl.tools.builtin.files",
    "OpenAITool": "agentrl.tools.definitions",
    "PythonTool": "agentrl.tools.builtin.python",
    "SearchTool": "agentrl.tools.builtin.search",
    "from_openai": "agentrl.tools.definitions",
    "mcp_tools": "agentrl.tools.mcp",
    "to_openai": "agentrl.tools.definitions",
}

__all__ = [
    "CalculatorTool",
    "FetchTool",
    "FilesTool",
    "FunctionTool",
    "OpenAITool",
    "Parsed",
    "Parser",
    "PythonTool",
    "SearchTool",
    "Tool",
    "ToolError",
    "ToolErrorType",
    "ToolResult",
    "close_tools",
    "detect_format",
    "from_openai",
    "get_parser",
    "mcp_tools",
    "run_call",
    "run_calls",
    "to_openai",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
