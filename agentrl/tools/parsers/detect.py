"""Which call format a model writes, and its parser."""

from __future__ import annotations

import re

from agentrl.errors import ConfigError
from agentrl.tools.parsers.base import NoneParser, Parser
from agentrl.tools.parsers.hermes import HermesParser
from agentrl.tools.parsers.tags import TagParser

_TAG_NAME = re.compile(r"[A-Za-z][\w-]*\Z")


def get_parser(name: str) -> Parser:
    """The parser of a call format.

    Args:
        name: ``hermes``, ``tags:<name>,<name>`` or ``none``. A family that :func:`detect_format` knows and
            whose calls cannot be read yet gives a parser that finds none, which suffices without tools.

    Raises:
        ConfigError: Unknown format, or tag names that cannot be tags.
    """
    if name == "hermes":
        return HermesParser()
    if name == "none" or name in {family for family, _ in _FAMILIES}:
        return NoneParser(name)
    if name.startswith("tags:"):
        names = tuple(part.strip() for part in name.removeprefix("tags:").split(","))
        reserved = [n for n in names if not _TAG_NAME.match(n) or n == "think"]
        if reserved or len(set(names)) != len(names):
            raise ConfigError(
                f"call format {name!r}: expected different tag names of letters, digits, - and _ "
                "(not 'think'), as in tags:search,answer."
            )
        return TagParser(names)
    raise ConfigError(f"unknown call format {name!r}; expected hermes, none or tags:<name>,<name>.")


_FAMILIES = (
    # (format, all of these strings are in the template), most specific first
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("deepseek", ("tool▁calls▁begin",)),
    ("kimi", ("tool_calls_section_begin",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("ipython", '"parameters"')),
)


def detect_format(chat_template: str) -> str:
    """How a model with this chat template writes calls.

    Returns:
        ``hermes``; ``none`` when the template takes no tools; or the name of another family.
    """
    for name, marks in _FAMILIES:
        if all(mark in chat_template for mark in marks):
            return name
    return "none"
