"""Help texts, generated from option declarations."""

from __future__ import annotations

import shutil
import textwrap
from itertools import groupby

from agentrl.config.options import Option, options
from agentrl.config.parse import ALIASES
from agentrl.config.schema import OptionSet


def default_text(option: Option) -> str:
    """The default as a person would write it; empty where there is none worth a word."""
    if option.kind in ("mapping", "passthrough", "pairs", "list") or option.default in (None, ""):
        return ""
    if option.kind == "bool":
        return "on" if option.default else "off"
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def flag_text(option: Option) -> str:
    """The flag with what stands behind it: ``--lr NUMBER``, ``--[no-]tensorboard``."""
    if option.kind == "passthrough":
        return "--sglang-NAME VALUE" if option.name == "sglang" else "--MEGATRON-NAME VALUE"
    if option.kind == "bool":
        return f"--[no-]{option.flag[2:]}"
    return f"{option.flag} {option.metavar}"


def _entry(option: Option, alias: str | None, width: int) -> str:
    notes = [str(option.range)] if option.range is not None else []
    default = default_text(option)
    notes += [f"default {default}"] if default else []
    notes += [f"also --{alias}"] if alias else []
    text = option.doc + (f" [{'; '.join(notes)}]" if notes else "")
    body = textwrap.fill(text.replace("`", ""), width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f"    {flag_text(option)}\n{body}"


def command_help(synopsis: str, intro: str, config_class: type) -> str:
    """Help of a command whose options are the dataclass ``config_class``, group by group, after what follows
    ``agentrl`` and a paragraph on what it does."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    aliases = {name: alias for alias, name in ALIASES.get(config_class.__name__, {}).items()}
    parts = [f"usage: agentrl {synopsis}", intro]
    if issubclass(config_class, OptionSet):
        text = "Options from a TOML, YAML or JSON file; keys are the flags' names. Flags on the command line win."
        parts.append("Configuration file:\n    --config FILE\n        " + text)
    for group, members in groupby(options(config_class).values(), key=lambda option: option.group):
        parts.append(f"{group}:\n" + "\n".join(_entry(o, aliases.get(o.name), width) for o in members))
    return "\n\n".join(parts)
