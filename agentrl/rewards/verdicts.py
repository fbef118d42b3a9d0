"""What a judge is asked, and the score in what it replies."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

from agentrl.errors import ConfigError
from agentrl.loading import toml_beside

_DATA = toml_beside(__file__, "judge.toml")
SYSTEM_PROMPT, PROMPT = _DATA["system_prompt"], _DATA["prompt"]
FORMATS = ("score", "number", "verdict")

_PLACEHOLDER = re.compile(r"\{(question|answer|response|row\.(\w+))\}")
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?![\d.]*\d)"
_SCORE = re.compile(rf"\bscore\b[\s*_:=\"']*({_NUMBER})", re.IGNORECASE)
_LAST_NUMBER = re.compile(rf"(?<![\w.])({_NUMBER})")
_VERDICT = re.compile(r"\bverdict\b[\s*_:=\"'\[]*([a-z]+)", re.IGNORECASE)
_REASONING = re.compile(r"^.*</think>", re.DOTALL)
_WORDS = {**dict.fromkeys(_DATA["right"], 1.0), **dict.fromkeys(_DATA["wrong"], 0.0)}


def check_prompt(template: str) -> None:
    """Raises ConfigError when a prompt has no place for the response."""
    if "{response}" not in template:
        raise ConfigError(
            "the judge's prompt has no {response}: write {question}, {answer}, {response} and {row.NAME} where they "
            "belong."
        )


def fill(template: str, text: str, answer: Any, row: dict[str, Any], max_chars: int) -> str:
    """The prompt about one response.

    Placeholders are replaced all at once, so that none in a question or a response is; the response is marked off by
    a code made of its own content, which it therefore cannot contain.

    Raises ConfigError: the prompt names a column that the task does not have."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "response":
            return _marked_off(_cut(text, max_chars))
        if match[1] == "question":
            return _question(row.get("prompt", ""))
        if match[1] == "answer":
            return _joined(answer)
        if match[2] not in row:
            raise ConfigError(
                f"the judge's prompt has {match[0]}, but the task has only {', '.join(map(str, row)) or 'no columns'}."
            )
        return _joined(row[match[2]])

    return _PLACEHOLDER.sub(value, template)


def _marked_off(text: str) -> str:
    code = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    return f"<<<response {code}\n{text}\n>>>end of response {code}"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit // 2, limit - limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


def _question(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    asked = [str(m.get("content", "")) for m in prompt if isinstance(m, dict) and m.get("role") != "system"]
    return "\n\n".join(asked)


def _joined(value: Any) -> str:
    if value is None:
        return "(none)"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return "\nor: ".join(map(str, value))
    return str(value)


def compile_format(form: str) -> re.Pattern[str] | None:
    """The pattern of a format that is a regular expression; None for one of :data:`FORMATS`.
    Raises ConfigError: it is neither, or has no group."""
    if form in FORMATS:
        return None
    try:
        pattern = re.compile(form)
    except re.error as error:
        raise ConfigError(
            f"parse={form!r}: expected {', '.join(FORMATS)}, a function, or a regular expression with a group around "
            f"the score: {error}."
        ) from error
    if not pattern.groups:
        raise ConfigError(
            f"parse={form!r}: a regular expression needs a group around the score, such as 'Grade: (\\\\d+)'; the "
            f"formats by name are {', '.join(FORMATS)}."
        )
    return pattern


def read_score(reply: str, form: str, scale: tuple[float, float]) -> float | None:
    """The score in a judge's reply, from 0 to 1; None when there is none. The last one counts.

    Args:
        reply: What the judge wrote. Its reasoning, up to ``</think>``, is passed over.
        form: ``score`` (``Score: 7``), ``number`` (the last number), ``verdict`` (``Verdict: correct``), or a regular
            expression whose first group is a number or such a word.
        scale: What is worth 0 and what is worth 1. A number outside of it is no score.
    """
    reply = _REASONING.sub("", reply)
    pattern = compile_format(form) or {"score": _SCORE, "number": _LAST_NUMBER, "verdict": _VERDICT}[form]
    found = [match[1] for match in pattern.finditer(reply) if match[1] is not None]
    if form == "verdict":
        found = [word for word in found if word.lower() in _WORDS]
    if not found:
        return None
    word = found[-1].strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        number = float(word)
    except ValueError:
        return None
    low, high = scale
    if not math.isfinite(number) or not min(low, high) <= number <= max(low, high):
        return None
    return (number - low) / (high - low)
