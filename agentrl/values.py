"""What a setting may be: one rule and one wording for environments, tools, rewards, sandboxes and wrappers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from agentrl.errors import ConfigError


def check_number(what: str, value: Any, least: float, most: float = math.inf, *, whole: bool = True) -> None:
    """Refuses a setting that is not a finite number from ``least`` to ``most``, both included.
    Raises ConfigError: says ``what`` is set, its value and what is expected."""
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not fits or not -math.inf < value < math.inf or not least <= value <= most:
        span = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(f"{what} is {value!r}; a {'whole ' if whole else ''}number {span} is expected.")


def check_choice(what: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuses a setting that is none of ``allowed``. Raises ConfigError."""
    if value not in (names := list(allowed)):
        raise ConfigError(f"{what} is {value!r}; expected one of {', '.join(names)}.")


def chosen(what: str, value: Any, allowed: Iterable[str]) -> tuple[str, ...]:
    """The choices that a setting names, one or several joined by ``+``. Raises ConfigError where one is unknown."""
    names, given = list(allowed), tuple(part.strip() for part in str(value).split("+"))
    if not set(given) <= set(names):
        raise ConfigError(f"{what} is {value!r}; expected {', '.join(names)}, or several joined by '+'.")
    return given
