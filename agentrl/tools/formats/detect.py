"""Which call format a model writes, and its parser."""

from __future__ import annotations

import functools
import re

from agentrl.errors import ConfigError
from agentrl.loading import toml_beside
from agentrl.tools.formats import families, gemma, gpt_oss, hermes, lfm2, minimax_m3, pythonic, tagged  # noqa: F401
from agentrl.tools.formats.base import FORMATS, NoneParser, Parser
from agentrl.tools.formats.tags import TagParser

_TABLES = toml_beside(__file__, "detect.toml")
_NAMED = {other: name for name, others in _TABLES["other_names"].items() for other in others.split()}
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*\Z")


@functools.lru_cache(maxsize=256)
def get_parser(name: str) -> Parser:
    """The parser of a call format, one for all: it has no state.

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


def detect_format(chat_template: str) -> str:
    """How a model with this chat template seems to write calls; :mod:`agentrl.rollout.template.check` makes sure.

    Returns:
        A name for :func:`get_parser`; ``none`` when the template takes no tools, or in a way that cannot be read.
    """
    for name, present, absent in _TABLES["marks"]:
        if all(mark in chat_template for mark in present) and not any(mark in chat_template for mark in absent):
            return name
    return "none"
