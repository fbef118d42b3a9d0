"""Messages between environments and an OpenAI-compatible server: each side in the form that it expects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl.chat_api.reply import Reply, ServerCall
from agentrl.errors import ConfigError
from agentrl.tools.formats import clean_text
from agentrl.tools.formats.strict_json import Malformed, read_json
from agentrl.types import Message

_INLINE = "inline"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def turn_text(content: str, reply: Reply) -> str:
    """A server's answer as the one text that environments step with.

    Reasoning comes first, between ``<think>`` tags, and calls last, in the hermes format. Nothing inside an argument
    can end a call or a reasoning block: its ``<`` is written as ``\\u003c``.
    """
    parts = [f"<think>\n{clean_text(reply.reasoning).strip()}\n</think>\n"] if reply.reasoning.strip() else []
    if reply.tool_calls:
        # What the server left in the content is no call in its eyes, and must not swallow the ones it read.
        content = content.replace(_OPEN, "[tool_call]").replace(_CLOSE, "[/tool_call]")
    if content:
        parts.append(content)
    parts += [f"{_OPEN}\n{_call_json(call)}\n{_CLOSE}" for call in reply.tool_calls]
    return "\n".join(parts)


def tokens_about(text: str) -> int:
    """An estimate of the tokens of ``text``: four characters each."""
    return (len(text) + 3) // 4


def _call_json(call: ServerCall) -> str:
    arguments = call_arguments(call.arguments)
    return json.dumps({"name": clean_text(call.name), "arguments": arguments}).replace("<", "\\u003c")


def call_arguments(text: str) -> Any:
    """Arguments as an object; the text itself when it is none, for the environment's parser to explain."""
    text = clean_text(text)
    if not text.strip():
        return {}
    try:
        value, end = read_json(text)
    except Malformed:
        return text
    return value if isinstance(value, dict) and not text[end:].strip() else text


def ended(content: str, reply: Reply, stop: tuple[str, ...]) -> str:
    """``content`` up to and with the stop string that ends it, whether or not the server knew or kept it."""
    ends = [at + len(word) for word in stop if (at := content.find(word)) >= 0]
    if ends:
        return content[: min(ends)]
    if reply.finish_reason == "length" or not stop:
        return content
    if reply.stopped_by is not None:
        return content + reply.stopped_by if reply.stopped_by in stop else content
    opened = [(at, word) for word in stop if word.startswith("</") and (at := content.rfind(f"<{word[2:]}")) >= 0]
    return content + max(opened)[1] if opened else content


def outgoing(message: Message) -> dict[str, Any]:
    """A message of ours in the form of the API: arguments as text, no fields that it does not have."""
    sent: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    if message["role"] == "tool":
        sent["tool_call_id"] = message.get("tool_call_id", "")
    if message["role"] == "assistant" and message.get("tool_calls"):
        sent["tool_calls"] = [_outgoing_call(call, index) for index, call in enumerate(message["tool_calls"])]
    return sent


def _outgoing_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call.get("id") or f"call_{index}",
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }


def refuse_inline(messages: Sequence[Message]) -> None:
    if any(message["role"] == _INLINE for message in messages):
        raise ConfigError(
            f"messages of role {_INLINE!r} continue the assistant's own turn, which a chat server cannot do. Evaluate "
            "this environment with --hf-checkpoint, or have it answer with messages of role 'user' or 'tool'"
        )
