"""MiniMax-M3: arguments as elements, nested ones too."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from agentrl.tools.formats.framed import MAX_ARGUMENTS, EnclosedParser
from agentrl.tools.formats.strict_json import MAX_DEPTH, Malformed, short_name
from agentrl.tools.formats.typed import kinds_of, resolved, typed
from agentrl.types import ToolCall

_MARK = "]<]minimax[>["


class MinimaxM3Parser(EnclosedParser):
    """MiniMax-M3: an element for each argument, ``<item>`` for each item of a list, all tags behind a mark."""

    name = "minimax-m3"
    opening, closing = f'{_MARK}<invoke name="', f"{_MARK}</invoke>"
    section = (f"{_MARK}<tool_call>", f"{_MARK}</tool_call>")
    hint = (
        f'Between {_MARK}<tool_call> and {_MARK}</tool_call> write {_MARK}<invoke name="NAME">, for each argument '
        f"{_MARK}<KEY>value{_MARK}</KEY>, and {_MARK}</invoke>."
    )
    reasoning_tags: ClassVar = {**EnclosedParser.reasoning_tags, "<mm:think>": "</mm:think>"}
    _NAME = re.compile(r'([^"\n<]{1,256})">')
    _TAG = re.compile(r"\s*<(/?)([^<>\s/][^<>]{0,255})>")

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        head = self._NAME.match(body)
        if head is None:
            raise Malformed(f'a call is {self.opening}NAME">, an element for each argument, and {self.closing}')
        pieces = body[head.end() :].split(_MARK)
        if len(pieces) > 16 * MAX_ARGUMENTS:
            raise Malformed(f"more than {8 * MAX_ARGUMENTS} values")
        if pieces[0].strip():
            raise Malformed(f"text before the first argument: each one is {_MARK}<KEY>value{_MARK}</KEY>")
        name = short_name(head[1])
        schema = self.schemas.get(name, {})
        arguments, at = self._children(pieces, 1, None, schema, schema, 0)
        if at < len(pieces):
            raise Malformed("an element is closed that was not opened")
        return [ToolCall(name, dict(arguments), self.call_id(number))]

    def _children(
        self, pieces: list[str], at: int, parent: str | None, schema: Any, root: Any, depth: int
    ) -> tuple[list[tuple[str, Any]], int]:
        """The elements from piece ``at`` on up to the end of ``parent``, and the position after it."""
        if depth > MAX_DEPTH:
            raise Malformed("nested too deeply")
        found: list[tuple[str, Any]] = []
        keys: set[str] = set()
        while at < len(pieces):
            tag = self._TAG.match(pieces[at])
            if tag is None:
                raise Malformed(f"{_MARK} must be followed by a tag")
            key, text = tag[2].strip(), pieces[at][tag.end() :]
            if tag[1]:
                if key != parent or text.strip():
                    raise Malformed(f"</{key[:40]}> closes <{parent}>" if key != parent else "text between arguments")
                return found, at + 1
            inner = _child(schema, key, root)
            children, at = self._children(pieces, at + 1, key, inner, root, depth + 1)
            if children and text.strip():
                raise Malformed(f"<{key[:40]}> holds text and elements")
            if key in keys and key != "item":
                raise Malformed(f"argument {key[:40]!r} is given twice")
            keys.add(key)
            found.append((key, _value(text, children, inner, root)))
        if parent is not None:
            raise Malformed(f"<{parent[:40]}> is not closed by {_MARK}</{parent[:40]}>")
        return found, at


def _value(text: str, children: list[tuple[str, Any]], schema: Any, root: Any) -> Any:
    kinds = kinds_of(schema, root)
    if children:
        is_list = all(key == "item" for key, _ in children) and ("array" in kinds or "object" not in kinds)
        return [value for _, value in children] if is_list else dict(children)
    if not text.strip() and "string" not in kinds:
        return [] if "array" in kinds else {} if "object" in kinds else text
    return typed(text, schema, root)


def _child(schema: Any, key: str, root: Any) -> Any:
    """The schema of an element."""
    schema = resolved(schema, root)
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    if key == "item" and schema.get("items"):
        return schema["items"]
    extra = schema.get("additionalProperties")
    return extra if isinstance(extra, dict) else None
