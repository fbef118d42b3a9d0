"""The options of the chat template, read and checked: the same for training, evaluation and serving."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.config.schema import DatedTemplateOptions, TemplateOptions
from agentrl.errors import ConfigError

_TAKEN = {
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "strftime_now"),
}


def checked_variables(variables: Any, where: str) -> dict[str, Any]:
    """``variables`` of a chat template, from a command line or a task, as they are.
    Raises ConfigError: they are no object, or hold what the template is given anyway; the text begins with
    ``where``."""
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        example = '{"enable_thinking": false}'
        raise ConfigError(f"{where}: a JSON object is expected, as in {example}, got {variables!r:.80}")
    if taken := sorted(_TAKEN & variables.keys()):
        raise ConfigError(f"{where} sets {taken[0]!r}, which is no variable of a template but how it is called")
    return variables


def template_variables(config: TemplateOptions) -> dict[str, Any]:
    """What the chat template gets to see.
    Raises ConfigError: it is no JSON object, or sets what the template is given anyway."""
    text = config.apply_chat_template_kwargs
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return checked_variables(value, "--apply-chat-template-kwargs")


def template_source(config: TemplateOptions) -> str | None:
    """The jinja source that replaces the model's own; None for that. Raises ConfigError: it cannot be read."""
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {config.chat_template}: it cannot be read: {error}") from None


def template_date(config: DatedTemplateOptions) -> datetime.date | None:
    """What the template takes for today; None: the day of each rendering. Raises ConfigError: it is no date."""
    text = config.chat_template_date
    try:
        return None if text is None else datetime.date.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--chat-template-date {text!r} is no date; YYYY-MM-DD is expected, as in 2026-01-31"
        ) from None


def template_problems(config: TemplateOptions) -> Iterator[str]:
    """All that is wrong with these options, a sentence each."""
    dated = isinstance(config, DatedTemplateOptions)
    for read in (template_variables, template_source, *((template_date,) if dated else ())):
        try:
            read(config)
        except ConfigError as error:
            yield str(error)
