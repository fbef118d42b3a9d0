"""Which call format a model writes, and its parser."""

from __future__ import annotations

import re

from agentrl.errors import ConfigError
from agentrl.tools.formats import families, gemma, gpt_oss, hermes, lfm2, minimax_m3, pythonic, tagged  # noqa: F401
from agentrl.tools.formats.base import FORMATS, NoneParser, Parser
from agentrl.tools.formats.tags import TagParser

# What SGLang (--tool-call-parser) and people call them.
_OTHER_NAMES = {
    "hermes": "qwen qwen25 qwen3 smollm3",
    "glm": "glm45 glm46",
    "deepseekv3": "deepseek deepseek_v3 deepseek_r1",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4 deepseekv41",
    "gpt-oss": "gpt_oss harmony",
    "gemma4": "gemma",
    "hunyuan": "hy3",
    "kimi_k2": "kimi",
    "llama3": "llama",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "qwen3_coder": "nemotron3 step3p5 nanbeige",
    "seed_oss": "seed-oss",
    "pythonic": "llama4",
}
_NAMED = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*\Z")


def get_parser(name: str) -> Parser:
    """The parser of a call format.

    Args:
        name: ``none``, ``tags:<name>,<name>``, or one of :data:`FORMATS`. SGLang's names for them are understood too
            (``qwen25``, ``glm45`` ...).

    Raises:
        ConfigError: Unknown format, or tag names that cannot be tags.
    """
    if name == "none":
        return NoneParser()
    if name.startswith("tags:"):
        return TagParser(_tag_names(name))
    found = FORMATS.get(_NAMED.get(name, name))
    if found is None:
        known = ", ".join(["none", *sorted(FORMATS)])
        raise ConfigError(f"unknown call format {name!r}; expected tags:<name>,<name> or one of {known}.")
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
    (("<|channel|>", "<|message|>", "<|call|>"), (), "gpt-oss"),
    (("<minimax:tool_call>", "<invoke name="), (), "minimax-m2"),
    (("]<]minimax[>[",), (), "minimax-m3"),
    (("｜DSML｜", "function_calls"), (), "deepseekv32"),
    (("｜DSML｜",), (), "deepseekv4"),
    (("<seed:tool_call>",), (), "seed_oss"),
    (("<|tool_call>call:",), (), "gemma4"),
    (("<tool_sep", "<arg_key"), (), "hunyuan"),
    (("<|open|>", "<|close|>"), (), "kimi_k3"),
    (("<TOOLCALL>",), (), "nemotron"),
    (("<tool_calls>[",), (), "apriel"),
    (("<|tool_call_start|>",), (), "lfm2"),
    (("List of tools: ",), ("<tool_call>",), "lfm2"),
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
    """How a model with this chat template seems to write calls; :mod:`agentrl.rollout.template.check` makes sure.

    Returns:
        A name for :func:`get_parser`; ``none`` when the template takes no tools, or in a way that cannot be read.
    """
    for present, absent, name in _MARKS:
        if all(mark in chat_template for mark in present) and not any(mark in chat_template for mark in absent):
            return name
    return "none"
