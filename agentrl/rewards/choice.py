"""Rewards for multiple choice: which letter was chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import EnvError
from agentrl.rewards.text import normalize_answer

LETTERS = "ABCDEFGHIJ"

_SAID = re.compile(r"(?i:\b(?:answer|option|choice)\s*(?:is|:)?\s*)[*\s({\[\\a-z]{0,12}?([A-Z])\b")
_ALONE = re.compile(r"\b([A-HJ-Z]|I(?!\s+\w|['’]))\b")  # not the I of "I think" or "I'm"


def gpqa(text: str, answer: Any, row: Mapping[str, Any] | None = None) -> float:
    """1.0 when the chosen letter is the right one (GPQA, Rein et al. 2023, and other multiple choice).

    The choice is the last letter behind *answer*, *option* or *choice*, else the last letter that stands alone; where
    no letter is given, the text of the right choice counts.

    Args:
        text: The model's final text.
        answer: The right letter, the right choice's number from 0, or its text.
        row: The task; ``row["metadata"]["choices"]`` may list the choices' texts, ``["correct_letter"]`` the letter.
    """
    metadata = (row or {}).get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    choices = metadata.get("choices") or []
    choices = [str(choice) for choice in (choices.values() if isinstance(choices, Mapping) else choices)]
    letters = LETTERS[: len(choices)] or LETTERS
    right = _right_letter(metadata.get("correct_letter", answer), letters, choices)
    if right is None and answer is None:
        raise EnvError("the task has neither an answer nor metadata['correct_letter'].")
    given = [letter for pattern in (_ALONE, _SAID) for letter in pattern.findall(text) if letter in letters]
    if right is not None and (given or not choices):
        return float(given[-1:] == [right])
    wanted = normalize_answer(str(answer) if right is None else choices[letters.index(right)])
    return float(wanted != "" and f" {wanted} " in f" {normalize_answer(text)} ")


def _right_letter(answer: Any, letters: str, choices: Sequence[str]) -> str | None:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        return letters[answer]
    word = str(answer).strip().strip("().").upper()
    if len(word) == 1 and word in letters:
        return word
    same = [n for n, choice in enumerate(choices) if normalize_answer(choice) == normalize_answer(str(answer))]
    return letters[same[0]] if same else None
