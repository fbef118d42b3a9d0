"""Call parsers: from what the model wrote to calls, reasoning and content.

A parser never raises on model text. A malformed call becomes a :class:`~agentrl.types.ToolCall` whose
``error`` says what is wrong. Nothing inside a reasoning block is a call.
"""

from agentrl.tools.formats.base import FORMATS, MAX_CALLS, Action, NoneParser, Parsed, Parser
from agentrl.tools.formats.detect import detect_format, get_parser
from agentrl.tools.formats.hermes import HermesParser
from agentrl.tools.formats.strict_json import MAX_DEPTH, clean_text
from agentrl.tools.formats.tags import TagParser

__all__ = [
    "FORMATS",
    "MAX_CALLS",
    "MAX_DEPTH",
    "Action",
    "HermesParser",
    "NoneParser",
    "Parsed",
    "Parser",
    "TagParser",
    "clean_text",
    "detect_format",
    "get_parser",
]
