"""The formats of families that write arguments as JSON, each as its published chat template writes it."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from agentrl.tools.formats.base import MAX_CALLS, Read
from agentrl.tools.formats.framed import EnclosedParser, FramedParser, JsonListParser, json_arguments
from agentrl.tools.formats.strict_json import Malformed, json_call, read_arguments, read_json, short_name, skip_space
from agentrl.types import ToolCall


class DeepSeekV3Parser(EnclosedParser):
    """DeepSeek-V3 and R1: a name, and the arguments in a block of code."""

    name = "deepseekv3"
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    inner = ("<｜tool▁sep｜>",)
    hint = (
        "Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line ```json, the arguments as "
        "a JSON object, a line ```, and <｜tool▁call▁end｜><｜tool▁calls▁end｜>."
    )

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        name, arguments = self._parts(body)
        if not name:
            raise Malformed("<｜tool▁sep｜> must be followed by the name of a tool")
        return [ToolCall(short_name(name), json_arguments(arguments), self.call_id(number))]

    def _parts(self, body: str) -> tuple[str, str]:
        kind_of_call, sep, rest = body.partition(self.inner[0])
        name, fence, code = rest.partition("```json")
        code, closing_fence, tail = code.rpartition("```")
        if not sep or kind_of_call.strip() != "function" or not fence or not closing_fence or tail.strip():
            raise Malformed("a call is function<｜tool▁sep｜>NAME and then the arguments between ```json and ```")
        if self.inner[0] in name:
            raise Malformed("<｜tool▁sep｜> stands twice in a call")
        return name.strip(), code


class DeepSeekV31Parser(DeepSeekV3Parser):
    """DeepSeek-V3.1: a name and the arguments as they are."""

    name = "deepseekv31"
    hint = (
        "Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>, the arguments as a JSON object, and "
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>."
    )

    def _parts(self, body: str) -> tuple[str, str]:
        name, sep, arguments = body.partition(self.inner[0])
        if not sep:
            raise Malformed("a call is NAME<｜tool▁sep｜> and then the arguments as a JSON object")
        return name.strip(), arguments


class KimiParser(EnclosedParser):
    """Kimi-K2: calls have ids of the form ``functions.NAME:INDEX``, which results refer to."""

    name = "kimi_k2"
    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    inner = ("<|tool_call_argument_begin|>",)
    hint = (
        "Write <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>, the "
        "arguments as a JSON object, and <|tool_call_end|><|tool_calls_section_end|>."
    )
    _ID = re.compile(r"(?:functions\.)?(?P<name>[\w.\-]+):\d+\Z|\d+\Z", re.ASCII)

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        head, token, rest = body.partition(self.inner[0])
        call_id = head.strip()
        found = self._ID.match(call_id) if len(call_id) <= 256 else None
        if not token or found is None:
            raise Malformed(f"a call is functions.NAME:INDEX{self.inner[0]} and then the arguments as a JSON object")
        arguments = json_arguments(rest)
        name = found["name"] or self._meant(arguments)
        if not name:
            raise Malformed("a call by number must have the arguments of one of the tools; write functions.NAME:INDEX")
        return [ToolCall(short_name(name), arguments, call_id)]

    def _meant(self, arguments: dict[str, Any]) -> str:
        """The tool that is called without its name: the one whose arguments these are."""
        known = {name: set(schema.get("properties") or ()) for name, schema in self.schemas.items()}
        fits = {name: len(keys & arguments.keys()) - len(arguments.keys() - keys) for name, keys in known.items()}
        return max(fits, key=fits.__getitem__, default="")


class MistralParser(JsonListParser):
    """Mistral: ``[TOOL_CALLS]`` and a list of calls, or, in newer models, ``[TOOL_CALLS]NAME[ARGS]{...}``."""

    name = "mistral"
    opening, closing = "[TOOL_CALLS]", ""
    inner = ("[ARGS]",)
    hint = 'Write [TOOL_CALLS] [{"name": "...", "arguments": {...}}].'
    reasoning_tags: ClassVar = {**JsonListParser.reasoning_tags, "[THINK]": "[/THINK]"}
    _COMPACT = re.compile(r"\s*(?P<name>[^\[\]{}\s]{1,256})\s*(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?\[ARGS\]")
    _ID = re.compile(r"[A-Za-z0-9]{9}\Z")

    def call_id(self, number: int) -> str:
        """Nine letters and digits: the templates refuse anything else."""
        return f"call{number:05d}"

    def _given_id(self, call_id: Any, number: int) -> str:
        return call_id if isinstance(call_id, str) and self._ID.match(call_id) else self.call_id(number)

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read | None:
        end = len(text)
        try:
            compact = self._COMPACT.match(text, start)
            value, end = read_json(text, start if compact is None else compact.end())
            if compact is None:
                return self._listed(value, number), end
            called, call_id = short_name(compact["name"]), self._given_id(compact["id"], number)
            return [ToolCall(called, read_arguments(value), call_id)], end
        except Malformed as problem:
            return [self._error(problem, number)], end


class NemotronParser(JsonListParser):
    """Nemotron Nano 2: ``<TOOLCALL>`` and a list of calls."""

    name = "nemotron"
    opening, closing = "<TOOLCALL>", "</TOOLCALL>"
    hint = 'Write <TOOLCALL>[{"name": "...", "arguments": {...}}]</TOOLCALL>.'


class AprielParser(JsonListParser):
    """Apriel 1.5 and 1.6: ``<tool_calls>`` and a list of calls."""

    name = "apriel"
    opening, closing = "<tool_calls>", "</tool_calls>"
    hint = 'Write <tool_calls>[{"name": "...", "arguments": {...}}]</tool_calls>.'


class LlamaParser(FramedParser):
    """Llama 3: a JSON object of ``name`` and ``parameters`` as the whole turn, or after ``<|python_tag|>``."""

    name = "llama3"
    opening, closing = "<|python_tag|>", ""
    ends = ("<|eom_id|>",)
    hint = 'Write {"name": "...", "parameters": {...}} and nothing else.'
    bare = re.compile(r"\s*(?=\{)")

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read | None:
        tagged = text.endswith(self.opening, 0, start)
        calls: list[ToolCall] = []
        position = start
        while len(calls) <= MAX_CALLS:
            try:
                value, end = read_json(text, position)
            except Malformed as problem:
                if not (tagged or calls or _meant_as_call(text, start)):
                    return None
                return [*calls, self._error(problem, number + len(calls))], len(text)
            if not (tagged or calls or self._is_call(value)):
                return None  # an answer in JSON
            calls.append(self._object(value, number + len(calls)))
            # Several calls are separated by semicolons.
            separator = skip_space(text, end)
            position = skip_space(text, separator + 1)
            if not (text.startswith(";", separator) and text.startswith("{", position)):
                return calls, end
        return calls, len(text)

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return False
        return "parameters" in value or "arguments" in value or value["name"] in self.schemas

    def _object(self, value: Any, number: int) -> ToolCall:
        try:
            key = "parameters" if isinstance(value, dict) and "parameters" in value else "arguments"
            return json_call(value, self.call_id(number), key)
        except Malformed as problem:
            return self._error(problem, number)


def _meant_as_call(text: str, start: int) -> bool:
    """Whether broken JSON was a call rather than an answer."""
    return (
        text.find('"name"', start) >= 0 and max(text.find('"parameters"', start), text.find('"arguments"', start)) >= 0
    )
