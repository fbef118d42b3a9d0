"""An answer of ``/chat/completions``, read leniently: servers differ in what they leave out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

REASONING_KEYS = ("reasoning_content", "reasoning")
_KEPT_KEYS = (*REASONING_KEYS, "reasoning_details")
_LENGTH = frozenset({"length", "max_tokens"})
_MOST_TOKENS = 1 << 31
"""A server that says more is not believed."""
_FAILED = frozenset({"abort", "error"})


@dataclass(frozen=True)
class ServerCall:
    """A tool call as the server gave it; ``arguments`` is JSON text as a rule, and may be anything."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """One turn of the model. Token counts are the server's, None where it gives none."""

    content: str
    reasoning: str
    tool_calls: list[ServerCall]
    kept: dict[str, Any]
    """Fields of the server's message, besides content and calls, that belong into the history."""
    finish_reason: str
    """``length`` or ``stop``."""
    stopped_by: str | int | None
    """What ended the turn, where the server says so: a stop string, or the id of a token."""
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int


def parse_reply(content: bytes) -> Reply:
    """Read an answer with status 200.
    Raises ValueError: it is not JSON, not a completion, or says that generating failed."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON ({error}): {content[:80]!r}") from None
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        calls = [_call(call) for call in message.get("tool_calls") or ()]
    except (KeyError, TypeError, IndexError, AttributeError):
        raise ValueError(
            f"the answer is not a chat completion: expected choices[0].message, got {content[:300]!r}"
        ) from None
    finish = choice.get("finish_reason")
    if finish in _FAILED:
        raise ValueError(f"the server gave the request up (finish_reason {finish!r})")
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    details = usage.get("prompt_tokens_details")
    stopped_by = choice.get("matched_stop", choice.get("stop_reason"))  # SGLang's name, vLLM's
    return Reply(
        content=_text(message.get("content")) or _text(message.get("refusal")),
        reasoning=next((text for key in REASONING_KEYS if (text := _text(message.get(key)))), ""),
        tool_calls=calls,
        kept={key: message[key] for key in _KEPT_KEYS if message.get(key)},
        finish_reason="length" if finish in _LENGTH else "stop",
        stopped_by=stopped_by if isinstance(stopped_by, str | int) else None,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=(_count(details.get("cached_tokens")) or 0) if isinstance(details, dict) else 0,
    )


def _call(call: dict[str, Any]) -> ServerCall:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {})
    return ServerCall(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


def _text(value: Any) -> str:
    """Text of a content field, which may be a list of parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = (part.get("text") for part in value if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None
