"""Gymnasium spaces in words: what an action may be, what an observation says, which action a text names."""

from __future__ import annotations

import enum
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl.loading import toml_beside

_NAMES: dict[str, dict[str, list[str]]] = toml_beside(__file__, "gymnasium_names.toml")
ACTION_NAMES, OBSERVATION_NAMES = _NAMES["actions"], _NAMES["observations"]

_NUMBER = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,3})?")
_NAMED = re.compile(r"\baction\b[\s*_`]*[:=][\s*_`]*", re.IGNORECASE)
_MINUS = str.maketrans({"\u2212": "-", "\u2012": "-", "\u2013": "-"})  # minus sign and dashes: a sign must not be lost
_SIGN = re.compile(r"(?<![\w.])([-+])\s+(?=[\d.])")
_EDGES = " \t\r\n.,;:!?*_`'\"()[]{}<>"


class ActionError(ValueError):
    """A text names no action of the space; the message tells the model why."""


def names_of_actions(env: gymnasium.Env[Any, Any], name: str) -> tuple[str, ...] | None:
    """Names of the actions of a discrete environment, unwrapped, where it says them, or Gymnasium's documentation of
    ``name``, its id without namespace and version."""
    space = env.action_space
    if not isinstance(space, spaces.Discrete):
        return None
    meanings = getattr(env, "get_action_meanings", None)
    actions = getattr(env, "actions", None)
    if callable(meanings):
        names = tuple(str(meaning).lower() for meaning in meanings())
    elif inspect.isclass(actions) and issubclass(actions, enum.IntEnum):
        names = tuple(action.name.lower() for action in sorted(actions))
    else:
        names = tuple(ACTION_NAMES.get(name, ()))
    return names if len(names) == space.n else None


def supported_action(space: spaces.Space[Any]) -> bool:
    """Whether a text can name an action of ``space``."""
    return isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box, spaces.Text))


def action_words(space: spaces.Space[Any], names: Sequence[str] | None) -> str:
    """What an action may be, as a sentence's object."""
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start) + int(space.n) - 1
        if names:
            return ", ".join(f"{number} = {name}" for number, name in enumerate(names, start=first))
        return f"a whole number from {first} to {last}"
    if isinstance(space, spaces.MultiDiscrete):
        low = np.broadcast_to(getattr(space, "start", 0), space.nvec.shape).ravel()
        ranges = [f"{int(a)} to {int(a + n) - 1}" for a, n in zip(low, space.nvec.ravel(), strict=True)]
        return f"a list of {len(ranges)} whole numbers from {', '.join(ranges)}"
    if isinstance(space, spaces.MultiBinary):
        return f"a list of {math.prod(space.shape)} numbers, each 0 or 1"
    if isinstance(space, spaces.Box):
        ranges = [f"{a:.4g} to {b:.4g}" for a, b in zip(space.low.ravel(), space.high.ravel(), strict=True)]
        bounds = ranges[0] if len(set(ranges)) == 1 else ", ".join(ranges)
        return f"a number from {bounds}" if len(ranges) == 1 else f"a list of {len(ranges)} numbers from {bounds}"
    if isinstance(space, spaces.Text):
        return f"text of {space.min_length} to {space.max_length} characters"
    return "of no form that has a text"


def observation_size(space: spaces.Space[Any]) -> int | None:
    """How many values an observation shows; None for a space that has no text."""
    if isinstance(space, spaces.Tuple):
        sizes = [observation_size(part) for part in space.spaces]
    elif isinstance(space, spaces.Dict):
        sizes = [observation_size(part) for part in space.spaces.values()]
    elif isinstance(space, (spaces.Discrete, spaces.Text)):
        return 1
    elif isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return math.prod(space.shape)
    else:
        return None
    return None if None in sizes else sum(size for size in sizes if size is not None)


def observation_words(value: Any, names: Sequence[str] | None = None) -> str:
    """An observation as text, floats with four digits. ``names``: what its numbers mean; left out where the count does
    not fit."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {observation_words(part)}" for key, part in value.items())
    if isinstance(value, str):
        return value
    parts = list(value) if isinstance(value, (tuple, list)) else np.asarray(value).ravel().tolist()
    texts = [_value_words(part) for part in parts]
    if names and len(names) == len(texts):
        return ", ".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _value_words(value: Any) -> str:
    if isinstance(value, (tuple, list, Mapping, str, np.ndarray)):
        return observation_words(value)
    if isinstance(value, (float, np.floating)):
        return f"{float(value):.4g}"
    return str(int(value))


_COLORED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
COLOR_LEGEND = "[X] is a highlighted field, (X) a blue one, {X} a magenta one, <X> one of another color."


def without_colors(text: str) -> tuple[str, bool]:
    """An ``ansi`` rendering as plain text, and whether there were colors: they often show where the player is.

    Highlights become ``[X]``, blue ``(X)``, magenta ``{X}``, other colors ``<X>``.
    """

    def bracketed(match: re.Match[str]) -> str:
        codes = [int(code) for code in match.group(1).split(";") if code]
        if not match.group(2) or all(code in (0, 1) for code in codes):
            return match.group(2)
        if any(40 <= code <= 47 or 100 <= code <= 107 for code in codes):
            left, right = "[]"
        else:
            left, right = "()" if 34 in codes else "{}" if 35 in codes else "<>"
        return f"{left}{match.group(2)}{right}"

    plain, count = _COLORED.subn(bracketed, text)
    return _ESCAPE.sub("", plain).rstrip().lstrip("\n"), count > 0


def parse_action(text: str, space: spaces.Space[Any], names: Sequence[str] | None = None) -> Any:
    """The action of ``space`` that the text of a turn names: what follows the last ``action:``, else the last line,
    else all of it. ``names``: of a discrete space's actions.
    Raises ActionError: no action, several, or one outside the space."""
    named = list(_NAMED.finditer(text))
    said = text[named[-1].end() :] if named else text
    if isinstance(space, spaces.Text):
        action = said.strip() if named else text.strip()
        if action in space:
            return action
        raise ActionError(f"{action[:60]!r} is not {action_words(space, None)} of the allowed characters")
    lines = [line for line in said.translate(_MINUS).splitlines() if line.strip(_EDGES)]
    if not lines:
        raise ActionError("your turn names no action")
    line = lines[0] if named else lines[-1]
    if not isinstance(space, spaces.Discrete) or space.start < 0:  # elsewhere a dash begins an item of a list
        line = _SIGN.sub(r"\1", line)
    if isinstance(space, spaces.Discrete):
        return _discrete(line, space, names or (), strict=not named)
    if not named and any(map(str.isalnum, _NUMBER.sub("", line))):
        raise ActionError(f"{line.strip()[:60]!r} is not marked as an action")
    return _array([float(number) for number in _NUMBER.findall(line)], space)


def _discrete(line: str, space: spaces.Discrete, names: Sequence[str], *, strict: bool) -> np.int64:
    """``strict``: nothing but the action may stand in the line, since nothing says that it is one."""
    first = int(space.start)
    by_name = {_plain(name): number for number, name in enumerate(names, start=first)}
    alone = _plain(line)
    if alone in by_name:
        return np.int64(by_name[alone])
    mentioned = {number for name, number in by_name.items() if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", alone)}
    found = [] if strict and not _NUMBER.fullmatch(alone) else _NUMBER.findall(alone)
    for number in map(float, found):
        if not number.is_integer() or not first <= number < first + int(space.n):
            raise ActionError(f"there is no action {number:g}")
        mentioned.add(int(number))
    if strict and not found:
        mentioned = set()
    if len(mentioned) == 1:
        return np.int64(mentioned.pop())
    if mentioned:
        raise ActionError(f"{line.strip()[:60]!r} names more than one action")
    raise ActionError(f"{line.strip()[:60]!r} names no action")


def _array(numbers: list[float], space: spaces.Space[Any]) -> Any:
    wanted = math.prod(space.shape or ())
    if len(numbers) != wanted:
        raise ActionError(f"{wanted} number{'s' if wanted > 1 else ''} expected, got {len(numbers)}")
    if not isinstance(space, spaces.Box) and not all(number.is_integer() for number in numbers):
        raise ActionError("whole numbers are expected")
    with np.errstate(over="ignore"):
        action = np.array(numbers).astype(space.dtype).reshape(space.shape)
    if not all(map(math.isfinite, numbers)) or action not in space:
        raise ActionError(f"{observation_words(np.array(numbers))} is outside of what is allowed")
    return action


def _plain(text: str) -> str:
    return " ".join(text.strip(_EDGES).casefold().split())
