"""Call parsers: from what the model wrote to calls, reasoning and content.

A parser never raises on model text. A malformed call becomes a :class:`~agentrl.types.ToolCall` whose
``error`` says what is wrong. Nothing inside a reasoning block is a call.
"""

from agentrl.tools.parsers.base import MAX_CALLS, NoneParser, Parsed, Parser
from agentrl.tools.parsers.detect import FORMATS, detect_format, get_parser
from agentrl.tools.parsers.hermes import HermesParser
from agentrl.tools.parsers.strict_json import MAX_DEPTH, clean_text
from agentrl.tools.parsers.tags import TagParser

__all__ = [
    "FORMATS",
    "MAX_CALLS",
    "MAX_DEPTH",
    "HermesParser",
    "NoneParser",
    "Parsed",
    "Parser",
    "TagParser",
    "clean_text",
    "detect_format",
    "get_parser",
]
