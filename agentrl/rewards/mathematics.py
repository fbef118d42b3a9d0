"""Rewards for mathematics: what the last boxed expression or number is worth."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from agentrl.rewards.text import answers

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
    return float(_is_right(last_number(text) if given is None else given, answer))


_LAST_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DAPO_TAIL = 300


def deepscaler(text: str, answer: Any, turns: Sequence[str] = ()) -> float:
    """1.0 when the last ``\\boxed{...}`` behind ``</think>`` equals the answer; 0.0 without either (DeepScaleR, 2025).

    Values are compared as by :func:`math_answer`.
    """
    _, closed, solution = (turns[-1] if turns else text).rpartition("</think>")
    return float(bool(closed) and _is_right(boxed(solution), answer))


def dapo(text: str, answer: Any) -> float:
    """1.0 when the last line ``Answer: ...`` in the last 300 characters equals the answer, else -1.0.

    DAPO (Yu et al. 2025, section 3); values are compared as by :func:`math_answer`.
    """
    found = _LAST_ANSWER.findall(text[-_DAPO_TAIL:])
    return 1.0 if found and _is_right(boxed(found[-1]) or found[-1], answer) else -1.0


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
    return next(reversed(_NUMBER.findall(text)), None)


def _is_right(given: str | None, answer: Any) -> bool:
    return given is not None and any(_same_value(given, boxed(gold) or gold) for gold in answers(answer))


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
    above, _, below = text.removesuffix("%").partition("/")
    if not all(_DECIMAL.fullmatch(part) for part in (above, below or "1")):
        return None
    divisor = Fraction((below or "1").removesuffix(".")) * (100 if text.endswith("%") else 1)
    return Fraction(above.removesuffix(".")) / divisor if divisor else None
