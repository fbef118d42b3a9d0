"""Reward functions: what is a turn's text worth, given the answer.

A reward function takes the model's final text and the task's answer, and by name, if it asks for
them, ``turns`` (all texts the model wrote), ``calls`` (the calls it made) and ``row`` (the task). It
sees only what the model produced, so no document can earn a reward. It returns a number, or a dict
of named parts. It may be ``async``.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from agentrl.errors import ConfigError, EnvError
from agentrl.loading import is_spec, load_object
from agentrl.tools.threads import run_blocking

RewardFunction = Callable[..., Any]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's normalization, Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answer: str | Sequence[str]) -> float:
    """1.0 when the normalized text equals the normalized answer, or one of several."""
    given = normalize_answer(text)
    return float(any(given == normalize_answer(gold) for gold in _answers(answer)))


def f1(text: str, answer: str | Sequence[str]) -> float:
    """Harmonic mean of token precision and recall, normalized as in :func:`exact_match`; best of several answers."""
    return max((_token_f1(text, gold) for gold in _answers(answer)), default=0.0)


def _token_f1(text: str, gold: str) -> float:
    given, wanted = normalize_answer(text).split(), normalize_answer(gold).split()
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return float(given == wanted)
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _answers(answer: Any) -> list[str]:
    if isinstance(answer, (list, tuple)):
        return [str(a) for a in answer]
    return [str(answer)]


# -- mathematics: what the last boxed expression or number is worth --------------------------------

_BRACE = re.compile(r"\\(?:boxed|fbox) ?\{|[{}]")
_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?(?: ?/ ?\d+)?")
_LATEX_NOISE = re.compile(
    r"\\(?:left|right|displaystyle|,|;|!|:|quad|qquad| )"
    r"|\\(?:text|mathrm)\s*\{[^{}]*\}"
    r"|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}"
    r"|[$~\s]"
)
_DECIMAL = re.compile(r"[-+]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][-+]?\d{1,3})?")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac(\d)(\d)")


def math_answer(text: str, answer: Any) -> float:
    """1.0 when the last ``\\boxed{...}`` of ``text``, or else its last number, equals the answer.

    Numbers are compared as exact fractions (``1/2``, ``0.5``, ``\\frac{1}{2}``, ``50\\%``), where one has a
    decimal point within a relative 1e-6; anything else as text after taking LaTeX spacing away.
    """
    given = boxed(text)
    if given is None:
        given = last_number(text)
    if given is None:
        return 0.0
    return float(any(_same_value(given, boxed(gold) or gold) for gold in _answers(answer)))


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` with balanced braces; None when there is none."""
    opened: list[int | None] = []  # per open brace: where its boxed content starts
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match.group() == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
        else:
            opened.append(match.end() if len(match.group()) > 1 else None)
    return None if last is None else text[last[0] : last[1]]


def last_number(text: str) -> str | None:
    """The last number in ``text``, as written."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match.group()
    return last


def _same_value(given: str, gold: str) -> bool:
    given, gold = _plain_math(given), _plain_math(gold)
    if given == gold:
        return bool(given)
    left, right = _value(given), _value(gold)
    if left is None or right is None:
        return False
    if "." in given or "." in gold:
        return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)
    return left == right


def _plain_math(text: str) -> str:
    text = _LATEX_NOISE.sub("", text.strip().rstrip(".")).replace("\\%", "%").replace("\\$", "")
    text = _SHORT_FRACTION.sub(r"(\1)/(\2)", text)
    for _ in range(4):  # innermost first
        text = _FRACTION.sub(r"(\1)/(\2)", text)
    if text.count("=") == 1 and len(text.split("=")[0]) <= 2:
        text = text.split("=")[1]  # x=5
    return text


def _value(text: str) -> Fraction | None:
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text).replace("(", "").replace(")", "")
    scale = Fraction(1, 100) if text.endswith("%") else Fraction(1)
    parts = text.removesuffix("%").split("/")
    if len(parts) > 2 or any(not _DECIMAL.fullmatch(part) for part in parts):
        return None
    numbers = [Fraction(part.removesuffix(".")) for part in parts]
    if len(numbers) == 2:
        return None if numbers[1] == 0 else scale * numbers[0] / numbers[1]
    return scale * numbers[0]


# -- loading and combining -------------------------------------------------------------------------

BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match, "f1": f1, "math": math_answer}
"""Reward functions that go by a name."""


def load(spec: str | RewardFunction) -> RewardFunction:
    """A reward function: itself, a name of :data:`BUILT_IN`, ``module:function`` or ``file.py:function``.

    Raises:
        ConfigError: Unknown name (with the nearest one) or not callable.
    """
    if isinstance(spec, str):
        if spec in BUILT_IN:
            return BUILT_IN[spec]
        if not is_spec(spec):
            near = difflib.get_close_matches(spec, BUILT_IN, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"unknown reward {spec!r}.{hint} Expected {', '.join(BUILT_IN)}, module:function or file.py:function."
            )
        spec = load_object(spec, "reward")
    if not callable(spec):
        raise ConfigError(f"a reward must be callable, got {spec!r}.")
    return spec


class RewardSet:
    """Weighted reward functions, each logged by its name.

    Args:
        rewards: Functions, names, or ``(weight, function)`` pairs. None gives an empty set.
    """

    NAMED = ("turns", "calls", "row")

    def __init__(self, rewards: Any) -> None:
        entries = rewards if isinstance(rewards, (list, tuple)) and not _is_pair(rewards) else [rewards]
        self.parts: list[tuple[str, float, RewardFunction]] = []
        for entry in entries:
            if entry is None:
                continue
            weight, function = entry if _is_pair(entry) else (1.0, entry)
            function = load(function)
            name = getattr(function, "__name__", type(function).__name__)
            same = sum(taken == name or taken.startswith(f"{name}_") for taken, _, _ in self.parts)
            self.parts.append((f"{name}_{same + 1}" if same else name, float(weight), function))

    async def __call__(self, text: str, answer: Any, **named: Any) -> dict[str, float]:
        """The weighted parts by name.

        Args:
            text: The model's final text.
            answer: The task's answer.
            **named: What functions may ask for by name, of :attr:`NAMED`.

        Raises:
            EnvError: A function returned something that is not a finite number or a dict of them.
        """
        result: dict[str, float] = {}
        for name, weight, function in self.parts:
            value = await _call(function, text, answer, named)
            for part, number in (value if isinstance(value, dict) else {name: value}).items():
                result[part] = result.get(part, 0.0) + weight * _finite(number, name)
        return result


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (int, float))


async def _call(function: RewardFunction, text: str, answer: Any, named: dict[str, Any]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    free = [p for p in positional if p.name not in named or p.kind is p.VAR_POSITIONAL]
    arguments = (text, answer) if len(free) > 1 or any(p.kind is p.VAR_POSITIONAL for p in free) else (text,)
    keywords = {k: v for k, v in named.items() if everything or k in names}
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments, **keywords)
    value = await run_blocking(function, *arguments, **keywords)
    return await value if inspect.isawaitable(value) else value


def _finite(value: Any, name: str) -> float:
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"reward {name!r} returned {value!r}; a finite number is expected.")
    return number
