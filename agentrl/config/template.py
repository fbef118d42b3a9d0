"""The options of the chat template, read and checked: the same for training, evaluation and serving."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.config.variables import checked_variables
from agentrl.errors import ConfigError

_FLAG = "--apply-chat-template-kwargs"


def template_variables(config: Any) -> dict[str, Any]:
    """What the chat template gets to see.

    Raises:
        ConfigError: it is no JSON object, or sets what the template is given anyway.
    """
    text = config.apply_chat_template_kwargs
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return checked_variables(value, _FLAG)


def template_source(config: Any) -> str | None:
    """The jinja source that replaces the model's own; None for that.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {config.chat_template}: it cannot be read: {error}") from None


def template_date(config: Any) -> datetime.date | None:
    """What the template takes for today; None: the day of each rendering.

    Raises:
        ConfigError: it is no date.
    """
    text = config.chat_template_date
    try:
        return None if text is None else datetime.date.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--chat-template-date {text!r} is no date; YYYY-MM-DD is expected, as in 2026-01-31"
        ) from None


def template_problems(config: Any) -> Iterator[str]:
    """All that is wrong with these options, a sentence each."""
    for read in (template_variables, template_source, template_date):
        try:
            if read is not template_date or hasattr(config, "chat_template_date"):
                read(config)
        except ConfigError as error:
            yield str(error)
