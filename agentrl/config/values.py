"""Reading one value: from a flag's text or from a file's typed value, with errors that say what was expected."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

from agentrl.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Allowed interval of a number; an open end is excluded."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.low is not None and (value <= self.low if self.low_open else value < self.low):
            return False
        return self.high is None or not (value >= self.high if self.high_open else value > self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"{'more than' if self.low_open else 'at least'} {self.low:g}"
        return (
            f"{'above' if self.low_open else 'from'} {self.low:g} {'to below' if self.high_open else 'to'} "
            f"{self.high:g}"
        )


@dataclass(frozen=True)
class PathMark:
    """Marks a text option as a path on disk."""


PathText = Annotated[str, PathMark()]
Positive = Annotated[int, Range(low=1)]
Count = Annotated[int, Range(low=0)]
Seconds = Annotated[float, Range(low=0.0, low_open=True)]
NonNegative = Annotated[float, Range(low=0.0)]
Probability = Annotated[float, Range(low=0.0, high=1.0)]

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def parse_bool(text: str) -> bool:
    """`true`/`false` (also yes/no, on/off, 1/0). Raises ValueError."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(text)


def parse_int(text: str) -> int:
    """A whole number; `_` may group digits and `1e6` is taken. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def parse_float(text: str) -> float:
    """A finite number. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def parse_json_or_text(text: str) -> Any:
    """JSON where it is JSON (without NaN and Infinity), else the text itself."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        return text


def _refuse(word: str) -> Any:
    raise ValueError(word)


def parse_key_value(text: str, flag: str) -> tuple[str, Any]:
    """``KEY=VALUE`` with a JSON value. Raises ConfigError naming ``flag``."""
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"{flag}: expected KEY=VALUE, got {text!r}")
    return key.strip(), parse_json_or_text(value)


PARSERS = {"int": parse_int, "float": parse_float, "bool": parse_bool, "str": str}
EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "text"}


def coerce(kind: str, value: Any) -> Any:
    """A file's typed value as ``kind`` (`int`, `float`, `bool`, `str`). Raises ValueError on another type.

    A whole float is taken as int, an int as float; text is never read as a number, so a quoted number in a
    file is an error and not a guess.
    """
    if kind == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, bool):
        raise ValueError(value)
    if kind == "int" and isinstance(value, (int, float)) and float(value).is_integer():
        return int(value)
    if kind == "float" and isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    if kind == "str" and isinstance(value, str):
        return value
    raise ValueError(value)
