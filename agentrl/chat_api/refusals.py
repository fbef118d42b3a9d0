"""What a refusal by an OpenAI-compatible server means. Servers agree on the status codes and on little else."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from agentrl.errors import EngineError

_TRANSIENT = frozenset({408, 409, 425, 429})
_FATAL = frozenset({401, 402, 403, 404, 405})
_UNPROCESSABLE = frozenset({400, 413, 422})
OPTIONAL = ("temperature", "top_p", "top_k", "seed", "stop", "reasoning")
"""What a request can do without. Stop strings are then found by the client, the rest is the server's own choice."""

_OVERFLOW = re.compile(
    r"context[ _-]?(?:length|window|size)|maximum context|exceed_context|longer than the model|prompt is too long"
    r"|max_model_len|too many tokens|must be at least 1, got -",
    re.IGNORECASE,
)
_UNSUPPORTED = re.compile(
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|extra (?:inputs|fields)|extra_forbidden"
    r"|not (?:permitted|allowed)|only the default",
    re.IGNORECASE,
)
_TOOLS = re.compile(r"\btools?\b|tool[_ -]choice|tool[_ -]call|function calling", re.IGNORECASE)
_QUOTA = re.compile(r"insufficient_quota|exceeded your current quota|billing", re.IGNORECASE)


class ContextOverflow(EngineError):
    """The conversation does not fit into the context of the model that the server serves."""


@dataclass(frozen=True)
class Refusal:
    """``kind``: transient, fatal, overflow, drop or rename (``field`` of the request), or refused."""

    kind: str
    field: str = ""


def error_text(content: bytes, limit: int = 600) -> str:
    """What the server said, from its error object where it has one."""
    text = content[:20000].decode("utf-8", "replace").strip()
    error = _error(content)
    message = error.get("message") or error.get("detail")
    text = message if isinstance(message, str) and message else text
    text = " ".join(text.split()) or "(no text)"
    return text if len(text) <= limit else text[:limit] + " ..."


def refusal(status: int, content: bytes, body: dict[str, Any]) -> Refusal:
    """Classify an answer whose status is not 200, by its ``content`` and the ``body`` of the request."""
    error, text = _error(content), content[:20000].decode("utf-8", "replace")
    if status == 429 and _QUOTA.search(text):
        return Refusal("fatal", "quota")
    if status in _TRANSIENT or (status >= 500 and status != 501):
        return Refusal("transient")
    if status in _UNPROCESSABLE:
        return _unprocessable(error, text, body)
    if status in _FATAL or 300 <= status < 400:
        return Refusal("fatal")
    return Refusal("refused")


def _unprocessable(error: dict[str, Any], text: str, body: dict[str, Any]) -> Refusal:
    if "max_tokens" in body and "max_completion_tokens" in text:
        return Refusal("rename", "max_completion_tokens")
    if _OVERFLOW.search(text):
        return Refusal("overflow")
    if _UNSUPPORTED.search(text):
        named = error.get("param")
        for name in OPTIONAL:
            sent = name in body or (name == "reasoning" and _has_reasoning(body))
            if sent and (named == name or re.search(rf"\b{name}", text)):
                return Refusal("drop", name)
    if body.get("tools") and _TOOLS.search(text) and (_UNSUPPORTED.search(text) or "requires" in text):
        return Refusal("fatal", "tools")
    return Refusal("refused")


def _has_reasoning(body: dict[str, Any]) -> bool:
    return any(key.startswith("reasoning") for message in body["messages"] for key in message)


def _error(content: bytes) -> dict[str, Any]:
    """The error object of an answer, in whichever of the usual places it is; empty when there is none."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(answer, dict):
        return {}
    error = answer.get("error", answer)
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}
