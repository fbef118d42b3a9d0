"""Actions that models write, and worse: for checking that no text breaks an environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MALFORMED = (*json.loads(Path(__file__).with_name("malformed.json").read_text("ascii")), "[" * 5000, "x" * 50_000)
"""Text that is no action: empty, unclosed, nested, of wrong types, of bytes that hurt, deep, long."""

_WORDS = ("", "a", "hello world", "7", "-1", "3.5", "naïve 你好", "null \0 byte", "x" * 2000)


def fuzz_actions(tools: Sequence[dict[str, Any]], call_format: str, rng: np.random.Generator) -> list[str]:
    """Calls of the ``tools`` (none in a tag format) with arguments drawn by their schemas, right and wrong, then
    :data:`MALFORMED`."""
    actions: list[str] = []
    for tool in tools:
        function = tool.get("function", {})
        for wrong in (False, False, True):
            call = {"name": function.get("name"), "arguments": _arguments(function.get("parameters", {}), rng, wrong)}
            actions.append(f"<tool_call>{json.dumps(call)}</tool_call>")
    if len(actions) > 1:
        actions.append("".join(actions[:2]))
    _, _, names = call_format.partition("tags:")
    tags = [name for name in names.split(",") if name]
    for name in tags:
        word = str(rng.choice(_WORDS))
        actions += [f"<{name}>{word}</{name}>", f"<{name}>", f"<{name}><{name}>{word}</{name}>", f"</{name}>"]
    # Answers end most episodes: a call first, then whatever text.
    return actions + list(MALFORMED)


def _arguments(schema: dict[str, Any], rng: np.random.Generator, wrong: bool) -> dict[str, Any]:
    properties = schema.get("properties", {})
    required = schema.get("required", list(properties))
    chosen = {name: _value(part, rng) for name, part in properties.items() if name in required or rng.random() < 0.5}
    if wrong:
        chosen = {name: [[value]] for name, value in chosen.items()}
        chosen["no_such_argument"] = 1
    return chosen


def _value(schema: Any, rng: np.random.Generator) -> Any:
    if not isinstance(schema, dict):
        return "x"
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    if "const" in schema:
        return schema["const"]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _value(options[int(rng.integers(len(options)))], rng)
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[0] if kind else "string"
    if kind == "object":
        return _arguments(schema, rng, False)
    if kind == "array":
        return [_value(schema.get("items", {}), rng) for _ in range(int(rng.integers(3)))]
    simple = {"integer": int(rng.integers(-3, 10)), "number": 0.5, "boolean": True, "null": None}
    return simple[kind] if kind in simple else str(rng.choice(_WORDS))
