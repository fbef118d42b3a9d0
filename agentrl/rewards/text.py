"""Rewards by comparing text with the answer."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agentrl.errors import EnvError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's normalization, Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answer: str | Sequence[str]) -> float:
    """1.0 when the normalized text equals the normalized answer, or one of several."""
    given = normalize_answer(text)
    return float(any(given == normalize_answer(gold) for gold in answers(answer)))


def f1(text: str, answer: str | Sequence[str]) -> float:
    """Harmonic mean of token precision and recall, normalized as in :func:`exact_match`; best of several answers."""
    return max((_token_f1(text, gold) for gold in answers(answer)), default=0.0)


def _token_f1(text: str, gold: str) -> float:
    given, wanted = normalize_answer(text).split(), normalize_answer(gold).split()
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return float(given == wanted)
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def answers(answer: Any) -> list[str]:
    """The answers that count as right: one, or each of a list.
    Raises EnvError: the task has no answer that a text could equal: it is missing, NaN or an object."""
    given = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if any(one is None or one != one or isinstance(one, dict) for one in given):
        raise EnvError(f"the task's answer is {answer!r:.120}; text, a number or a list of them is expected.")
    return [str(one) for one in given]
