"""Whether ``info`` has the form in which the episode loop, the store and the scores read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from agentrl.tools.definitions import problem_of
from agentrl.types import StopReason


class CheckFailed(Exception):
    """What a check found wrong; the text says it."""


def check_start(info: dict[str, Any]) -> None:
    """The ``info`` of a reset: what the loop reads there has the form that it reads."""
    for name in ("task_id", "category", "raw_prompt"):
        if not isinstance(info.get(name, ""), str):
            raise CheckFailed(f"info[{name!r}] is {info[name]!r:.80}; text is expected")
    if not info["messages"]:
        raise CheckFailed("info['messages'] after a reset is empty; the conversation needs a first message")
    prompts = {"info": info, **{f"info['prompts'][{name!r}]": part for name, part in info.get("prompts", {}).items()}}
    for where, prompt in prompts.items():
        check_messages(prompt["messages"], f"{where}['messages']")
        stop = prompt.get("stop") or ()
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
            raise CheckFailed(f"{where}['stop'] is {stop!r:.80}; a list of strings is expected")
        if not isinstance(prompt.get("tools") or (), (list, tuple)):
            raise CheckFailed(f"{where}['tools'] is {prompt['tools']!r:.80}; a list of schemas is expected")
    check_json(info, "reset")


def check_messages(messages: Any, where: str) -> None:
    """Messages as chat templates take them."""
    for message in messages:
        said = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if said[-1] is None and isinstance(message, dict) and message.get("tool_calls"):
            said.pop()  # the OpenAI form of a turn that only calls
        if not all(isinstance(text, str) for text in said):
            raise CheckFailed(f"{where} holds {message!r:.80}; a dict with 'role' and 'content' as text is expected")


def check_json(info: dict[str, Any], after: str) -> None:
    """What is kept in the record of an episode can be written down."""
    place = _unstorable(info, "info")
    if place is not None:
        where, value, why = place
        raise CheckFailed(f"{where} after a {after} is {value!r:.60} ({type(value).__name__}), {why}")


def _unstorable(value: Any, where: str) -> tuple[str, Any, str] | None:
    """Where in ``value`` something is that JSON cannot say, what it is, and what to do."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key is not None and not isinstance(key, (str, int, float)):
                return f"a key of {where}", key, "which is no JSON: use text"
            if (found := _unstorable(item, f"{where}[{key!r}]")) is not None:
                return found
        return None
    if isinstance(value, (list, tuple)):
        places = (_unstorable(item, f"{where}[{number}]") for number, item in enumerate(value))
        return next((place for place in places if place is not None), None)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return where, value, "which JSON cannot say"
    except TypeError:
        item = getattr(value, "item", None)
        return where, value, "which is no JSON: use float(...) or int(...)" if callable(item) else "which is no JSON"
    return None


def check_end(info: dict[str, Any]) -> None:
    """The ``info`` of a last step: why the episode ended, and whether it is a success."""
    reason = info.get("stop_reason")
    if reason not in set(StopReason):
        raise CheckFailed(f"stop_reason {reason!r} is none of {', '.join(StopReason)}")
    if info.get("success") not in (None, True, False):
        raise CheckFailed(f"info['success'] is {info['success']!r}; a bool is expected")


def check_tools(tools: Sequence[Any]) -> None:
    """Tools in the OpenAI form, described by valid JSON schemas, each of another name."""
    names: set[str] = set()
    for tool in tools:
        if problem := problem_of(tool):
            raise CheckFailed(problem)
        name, parameters = tool["function"]["name"], tool["function"]["parameters"]
        if name in names:
            raise CheckFailed(f"two tools are named {name!r}")
        names.add(name)
        try:
            jsonschema.Draft202012Validator.check_schema(parameters)
        except jsonschema.SchemaError as invalid:
            where = f"tool {name!r}: parameters at {invalid.json_path}"
            raise CheckFailed(f"{where} are no JSON schema: {invalid.message:.200}") from invalid
        unknown = [key for key in parameters.get("required", ()) if key not in parameters.get("properties", {})]
        if unknown:
            raise CheckFailed(f"tool {name!r}: {unknown[0]!r} is required and not described")
