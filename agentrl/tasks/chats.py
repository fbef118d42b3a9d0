"""Written conversations from files: rows with ``messages`` in the OpenAI form, and ``tools`` where there are any."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentrl.errors import DataError
from agentrl.tasks.dataset import ROLES
from agentrl.tasks.files import find_files, read_records
from agentrl.types import Message

_TEXTS = ("reasoning_content", "name", "tool_call_id")
_MARKS = ("weight", "train", "step_loss_mask")
"""What says whether a turn of the assistant is learned: in OpenAI's files, in those of others, in slime's."""


@dataclass(frozen=True)
class WrittenChat:
    """A conversation to learn.

    Attributes:
        chat_id: 16 hex digits of a hash of all that is in it.
        messages: at least one of the assistant that is learned, never the first; arguments of calls are mappings, and
            ``weight`` is there, as 0, where the assistant's words are not learned.
        tools: definitions that the assistant was given.
        place: where it stands, for messages.
    """

    chat_id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    place: object


def read_chats(source: str | os.PathLike[str]) -> list[WrittenChat]:
    """All conversations of a file, a folder or a glob of files, in order.
    Raises DataError: there are none, or one is not of the form that it must have: the text names file and line."""
    found = [checked_chat(row, place) for file in find_files(source) for place, row in read_records(file)]
    if not found:
        raise DataError(f"{os.fspath(source)!r} holds no conversation.")
    return found


def checked_chat(row: Mapping[str, Any], place: object) -> WrittenChat:
    """A row as a conversation. Raises DataError that says where it stands and what is wrong."""
    given = row.get("messages")
    if not isinstance(given, list) or not given:
        raise DataError(
            f"{place}: expected a list 'messages' with at least one message, got {given!r:.60}; the row has "
            f"{', '.join(row) or 'nothing'}."
        )
    messages = [_message(message, f"{place}: message {number}") for number, message in enumerate(given, 1)]
    if messages[0]["role"] == "assistant":
        raise DataError(f"{place}: the first message is the assistant's; something must be said to it before.")
    if all(message["role"] != "assistant" or "weight" in message for message in messages):
        but = " but those that are not to be learned" if any(m["role"] == "assistant" for m in messages) else ""
        raise DataError(f"{place}: no message is the assistant's{but}, so there is nothing to learn.")
    tools = _tools(row.get("tools"), place)
    digest = hashlib.sha256(json.dumps([messages, tools], sort_keys=True).encode()).hexdigest()
    return WrittenChat(digest[:16], messages, tools, place)


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: expected an object with 'role' and 'content', got {given!r:.60}.")
    message = {key: value for key, value in given.items() if value is not None}  # a table has all fields in all rows
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where}: role {role!r:.40} is not one of {', '.join(ROLES)}.")
    if "more" in message:  # where records keep calls, without the tools that were offered
        raise DataError(f"{where}: it is of a stored trajectory; give --sft-from the run, in place of its files.")
    for name in _TEXTS:
        if not isinstance(message.get(name, ""), str):
            raise DataError(f"{where}: {name!r} must be text, got {message[name]!r:.60}.")
    message["content"] = _content(message.get("content", ""), where)
    if not _learned(message, where) and role == "assistant":
        message["weight"] = 0
    calls = message.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise DataError(f"{where}: 'tool_calls' is a list, and the assistant's alone, got {calls!r:.60} of {role}.")
        message["tool_calls"] = [_call(call, f"{where}: call {number}") for number, call in enumerate(calls, 1)]
    if role == "assistant" and not any(message.get(n) for n in ("content", "tool_calls", "reasoning_content")):
        raise DataError(f"{where}: the assistant says nothing: no content, no tool_calls, no reasoning_content.")
    return cast(Message, message)


def _learned(message: dict[str, Any], where: str) -> bool:
    """Whether what is said is learned; takes the marks that say so out of the message."""
    marks = {name: message.pop(name) for name in _MARKS if name in message}
    for name, mark in marks.items():
        if mark not in (0, 1):
            raise DataError(f"{where}: {name!r} must be 1 (true) or 0 (false), got {mark!r:.60}.")
        if mark and message["role"] != "assistant":
            said = f"{name!r} marks words of {message['role']} as learned; the assistant's alone are"
            raise DataError(f"{where}: {said}.")
    return all(marks.values())


def _content(given: Any, where: str) -> str:
    if isinstance(given, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in given):
        given = "".join(str(part.get("text", "")) for part in given)
    if not isinstance(given, str):
        raise DataError(f"{where}: 'content' must be text, or a list of parts of type text, got {given!r:.60}.")
    return given


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise DataError(f"{where}: expected {{'function': {{'name', 'arguments'}}}}, got {given!r:.80}.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"{where}: the arguments of {name!r} are not JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: the arguments of {name!r} must be an object, got {arguments!r:.60}.")
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": str(given["id"]), **made} if given.get("id") else made


def _tools(given: Any, place: object) -> list[dict[str, Any]] | None:
    if isinstance(given, str) and given.strip():  # as tables hold them, where schemas differ from row to row
        try:
            given = json.loads(given)
        except ValueError as error:
            raise DataError(f"{place}: 'tools' is text that is not JSON: {error}.") from None
    if not given:
        return None
    if not isinstance(given, list):
        raise DataError(f"{place}: 'tools' must be a list of definitions, got {given!r:.60}.")
    for number, tool in enumerate(given, 1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{place}: tool {number}: expected {{'type': 'function', 'function': {{'name', 'parameters'}}}}, got "
                f"{tool!r:.80}."
            )
    return given
