"""Which call format a model writes, and its parser."""

from __future__ import annotations

import re

from agentrl.errors import ConfigError
from agentrl.tools.parsers.base import NoneParser, Parser
from agentrl.tools.parsers.families import FAMILIES
from agentrl.tools.parsers.hermes import HermesParser
from agentrl.tools.parsers.pythonic import PythonicParser
from agentrl.tools.parsers.tags import TagParser

_FORMATS: dict[str, type[Parser]] = {
    "hermes": HermesParser,
    "none": NoneParser,
    "pythonic": PythonicParser,
    **FAMILIES,
}
_OTHER_NAMES = {
    # What SGLang (--tool-call-parser) and people call them.
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "glm45": "glm",
    "glm46": "glm",
    "deepseek": "deepseekv3",
    "deepseek_v3": "deepseekv3",
    "deepseek_r1": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "kimi": "kimi_k2",
    "llama": "llama3",
    "step3p5": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "llama4": "pythonic",
}
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*\Z")


def get_parser(name: str) -> Parser:
    """The parser of a call format.

    Args:
        name: ``hermes``, ``tags:<name>,<name>``, ``none``, ``pythonic``, or a family's format: ``glm``, ``glm47``,
            ``qwen3_coder``, ``deepseekv3``, ``deepseekv31``, ``kimi_k2``, ``mistral``, ``llama3``. SGLang's
            names for them are understood too (``qwen25``, ``glm45`` ...).

    Raises:
        ConfigError: Unknown format, or tag names that cannot be tags.
    """
    if name.startswith("tags:"):
        return TagParser(_tag_names(name))
    found = _FORMATS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise ConfigError(f"unknown call format {name!r}; expected tags:<name>,<name> or one of {', '.join(_FORMATS)}.")
    return found()


def _tag_names(name: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in name.removeprefix("tags:").split(","))
    reserved = [n for n in names if not _TAG_NAME.match(n) or n == "think"]
    if reserved or len(set(names)) != len(names):
        raise ConfigError(
            f"call format {name!r}: expected different tag names of letters, digits, - and _ "
            "(not 'think'), as in tags:search,answer."
        )
    return names


_MARKS = (
    # (all of these strings are in the template, none of those, format), most specific first
    (("<tool_call>", "</arg_key><arg_value>"), (), "glm47"),
    (("<tool_call>", "<arg_key>"), ("<tool_sep>",), "glm"),
    (("<tool_call>", "<function="), (), "qwen3_coder"),
    (("<tool_call>",), ("<arg_key>",), "hermes"),
    (("tool▁calls▁begin", "```json"), (), "deepseekv3"),
    (("tool▁calls▁begin",), (), "deepseekv31"),
    (("tool_calls_section_begin",), (), "kimi_k2"),
    (("[TOOL_CALLS]",), (), "mistral"),
    (("ipython", '"parameters"'), (), "llama3"),
    (("<|python_start|>",), (), "pythonic"),
)


def detect_format(chat_template: str) -> str:
    """How a model with this chat template writes calls.

    Returns:
        A name for :func:`get_parser`; ``none`` when the template takes no tools, or in a way that cannot be read.
    """
    for present, absent, name in _MARKS:
        if all(mark in chat_template for mark in present) and not any(mark in chat_template for mark in absent):
            return name
    return "none"
