"""The call formats of model families, each as its published chat template writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.tools.parsers.base import MAX_CALLS, Parsed, Read
from agentrl.tools.parsers.sglang_detectors import DetectorParser, Draft, EnclosedParser
from agentrl.tools.parsers.strict_json import Malformed, kind, read_arguments, read_json, read_name, skip_space
from agentrl.types import ToolCall

MAX_ARGUMENTS = 256
"""Arguments of one call in a format that writes them as tags."""


class GlmParser(EnclosedParser):
    """GLM-4.5 and 4.6: the name on a line, then a key and a value on a line each. Values are typed by the schemas."""

    name = "glm"
    # Of SGLang's two detectors for GLM this one keeps an argument of type string as it was written.
    detector = ("glm47_moe_detector", "Glm47MoeDetector")
    opening, closing = "<tool_call>", "</tool_call>"
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    hint = (
        "Write the tool's name after <tool_call>, then <arg_key>name</arg_key> and <arg_value>value</arg_value> "
        "for each argument, then </tool_call>."
    )
    _TAG = re.compile("(" + "|".join(inner) + ")")
    # Models also write the two characters \n where the template has a line's end.
    _GAP = re.compile(r"(?:\\n|\s)*\Z")
    _GAP_BACKWARDS = re.compile(r"(?:n\\|\s)*")  # from the end: linear

    def _draft(self, body: str) -> Draft:
        first, *pieces = self._TAG.split(body, maxsplit=4 * MAX_ARGUMENTS + 1)
        name = first[: len(first) - self._GAP_BACKWARDS.match(first[::-1]).end()].strip()
        if not name:
            raise Malformed(f"{self.opening} must be followed by the name of a tool")
        if len(pieces) > 8 * MAX_ARGUMENTS:
            raise Malformed(f"more than {MAX_ARGUMENTS} arguments")
        pairs: dict[str, str] = {}
        for at in range(0, len(pieces), 8):
            tags, texts = tuple(pieces[at : at + 8 : 2]), pieces[at + 1 : at + 8 : 2]
            if tags != self.inner or not (self._GAP.match(texts[1]) and self._GAP.match(texts[3])):
                raise Malformed("each argument is <arg_key>name</arg_key> and then <arg_value>value</arg_value>")
            key = texts[0].strip()
            if not key or key in pairs:
                raise Malformed(f"argument {key[:40]!r} is given twice" if key else "an argument has no name")
            pairs[key] = texts[2]
        arguments = [f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs.items()]
        return Draft(name, "".join([self.opening, name, *arguments, self.closing]))


class Glm47Parser(GlmParser):
    """GLM-4.7 and 5: as GLM-4.5 without line ends."""

    name = "glm47"


class Qwen3CoderParser(EnclosedParser):
    """Qwen3-Coder: ``<function=name>`` with ``<parameter=key>`` blocks. Values are typed by the schemas."""

    name = "qwen3_coder"
    detector = ("qwen3_coder_detector", "Qwen3CoderDetector")
    opening, closing = "<tool_call>", "</tool_call>"
    inner = ("<function=", "</function>")
    hint = (
        "Between <tool_call> and </tool_call> write <function=NAME>, for each argument "
        "<parameter=KEY>value</parameter>, and </function>."
    )
    _FUNCTION = re.compile(r"\s*<function=([^>\n<]*)>")
    _PARAMETER = re.compile(r"(<parameter=[^>\n]*>|</parameter>)")

    def _draft(self, body: str) -> Draft:
        found = self._FUNCTION.match(body)
        if found is None or not found[1].strip():
            raise Malformed("a call starts with <function=NAME>")
        end = body.find("</function>", found.end())
        if end < 0:
            raise Malformed("<function=NAME> is not closed by </function>")
        if body[end + len("</function>") :].strip():
            raise Malformed("text after </function>: write one function in each call")
        pieces = self._PARAMETER.split(body[found.end() : end], maxsplit=2 * MAX_ARGUMENTS + 1)
        if len(pieces) > 4 * MAX_ARGUMENTS + 1:
            raise Malformed(f"more than {MAX_ARGUMENTS} arguments")
        seen: set[str] = set()
        for before, tag, _, close in zip(pieces[::4], pieces[1::4], pieces[2::4], [*pieces[3::4], ""], strict=False):
            key = tag.removeprefix("<parameter=")[:-1].strip()
            if before.strip() or not tag.startswith("<parameter=") or close != "</parameter>" or not key:
                raise Malformed("each argument is <parameter=KEY>value</parameter>")
            if key in seen:
                raise Malformed(f"argument {key[:40]!r} is given twice")
            seen.add(key)
        if pieces[-1].strip():
            raise Malformed("text between arguments: each one is <parameter=KEY>value</parameter>")
        name = found[1].strip()
        return Draft(name, f"{self.opening}\n<function={name}>{body[found.end() : end]}</function>\n{self.closing}")

    def _detected(self, draft: Draft, number: int) -> ToolCall:
        call = super()._detected(draft, number)
        # The detector makes False of whatever is not "true"; the tool's validation should see what was written.
        for key in [key for key, value in call.arguments.items() if value is False]:
            written = draft.text.partition(f"<parameter={key}>")[2].partition("</parameter>")[0].strip()
            if written.lower() != "false":
                call.arguments[key] = written
        return call


class DeepSeekV3Parser(EnclosedParser):
    """DeepSeek-V3 and R1: a name, and the arguments in a block of code."""

    name = "deepseekv3"
    detector = ("deepseekv3_detector", "DeepSeekV3Detector")
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    inner = ("<｜tool▁sep｜>",)
    hint = (
        "Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line ```json, the arguments as "
        "a JSON object, a line ```, and <｜tool▁call▁end｜><｜tool▁calls▁end｜>."
    )

    def _draft(self, body: str) -> Draft:
        name, arguments = self._parts(body)
        if not name:
            raise Malformed("<｜tool▁sep｜> must be followed by the name of a tool")
        return Draft(name, self._written(name, _object_text(arguments)))

    def _parts(self, body: str) -> tuple[str, str]:
        kind_of_call, sep, rest = body.partition(self.inner[0])
        name, fence, code = rest.partition("```json")
        code, closing_fence, tail = code.rpartition("```")
        if not sep or kind_of_call.strip() != "function" or not fence or not closing_fence or tail.strip():
            raise Malformed("a call is function<｜tool▁sep｜>NAME and then the arguments between ```json and ```")
        if self.inner[0] in name:
            raise Malformed("<｜tool▁sep｜> stands twice in a call")
        return name.strip(), code

    def _written(self, name: str, arguments: str) -> str:
        call = f"{self.opening}function{self.inner[0]}{name}\n```json\n{arguments}\n```{self.closing}"
        return f"{self.section[0]}{call}{self.section[1]}"


class DeepSeekV31Parser(DeepSeekV3Parser):
    """DeepSeek-V3.1: a name and the arguments as they are."""

    name = "deepseekv31"
    detector = ("deepseekv31_detector", "DeepSeekV31Detector")
    hint = (
        "Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>, the arguments as a JSON object, and "
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>."
    )

    def _parts(self, body: str) -> tuple[str, str]:
        name, sep, arguments = body.partition(self.inner[0])
        if not sep:
            raise Malformed("a call is NAME<｜tool▁sep｜> and then the arguments as a JSON object")
        return name.strip(), arguments

    def _written(self, name: str, arguments: str) -> str:
        return f"{self.section[0]}{self.opening}{name}{self.inner[0]}{arguments}{self.closing}{self.section[1]}"


class KimiParser(EnclosedParser):
    """Kimi-K2: calls have ids of the form ``functions.NAME:INDEX``, which results refer to."""

    name = "kimi_k2"
    detector = ("kimik2_detector", "KimiK2Detector")
    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    inner = ("<|tool_call_argument_begin|>",)
    hint = (
        "Write <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>, the "
        "arguments as a JSON object, and <|tool_call_end|><|tool_calls_section_end|>."
    )
    _ID = re.compile(r"(?:functions\.)?(?P<name>[\w.\-]+):\d+\Z|\d+\Z", re.ASCII)

    def _draft(self, body: str) -> Draft:
        head, token, rest = body.partition(self.inner[0])
        call_id = head.strip()
        found = self._ID.match(call_id) if len(call_id) <= 256 else None
        if not token or found is None:
            raise Malformed(f"a call is functions.NAME:INDEX{self.inner[0]} and then the arguments as a JSON object")
        call = f"{self.opening}{call_id}{self.inner[0]}{_object_text(rest)}{self.closing}"
        return Draft(found["name"], f"{self.section[0]}{call}{self.section[1]}", call_id)


class MistralParser(DetectorParser):
    """Mistral: ``[TOOL_CALLS]`` and a list of calls, or, in newer models, ``[TOOL_CALLS]NAME[ARGS]{...}``."""

    name = "mistral"
    detector = ("mistral_detector", "MistralDetector")
    opening, closing = "[TOOL_CALLS]", ""
    inner = ("[ARGS]",)
    hint = 'Write [TOOL_CALLS] [{"name": "...", "arguments": {...}}].'
    reasoning_tags: ClassVar[Mapping[str, str]] = {**DetectorParser.reasoning_tags, "[THINK]": "[/THINK]"}
    _COMPACT = re.compile(r"\s*(?P<name>[^\[\]{}\s]{1,256})\s*(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?\[ARGS\]")
    _ID = re.compile(r"[A-Za-z0-9]{9}\Z")

    def call_id(self, number: int) -> str:
        """Nine letters and digits: the templates refuse anything else."""
        return f"call{number:05d}"

    def _read_calls(self, text: str, start: int, name: str, number: int) -> Read | None:
        end = len(text)
        try:
            compact = self._COMPACT.match(text, start)
            if compact is not None:
                value, end = read_json(text, compact.end())
                arguments = read_arguments(value)
                return [self._one(compact["name"], arguments, compact["id"], number)], end
            if not text.startswith("[", skip_space(text, start)):
                raise Malformed(f"{self.opening} must be followed by a JSON list of calls")
            value, end = read_json(text, start)
        except Malformed as problem:
            return [ToolCall(name, {}, self.call_id(number), str(problem))], end
        if not value:
            return [ToolCall(name, {}, self.call_id(number), "the list of calls is empty")], end
        return [self._element(item, number + i) for i, item in enumerate(value[: MAX_CALLS + 1])], end

    def _element(self, item: Any, number: int) -> ToolCall:
        name = ""
        try:
            if not isinstance(item, dict):
                raise Malformed(f"a call is a JSON object, got {kind(item)}")
            name = read_name(item)
            return self._one(name, read_arguments(item.get("arguments", {})), item.get("id"), number)
        except Malformed as problem:
            return ToolCall(name, {}, self.call_id(number), str(problem))

    def _one(self, name: str, arguments: dict[str, Any], call_id: Any, number: int) -> ToolCall:
        written = json.dumps([{"name": name, "arguments": arguments}])
        own = call_id if isinstance(call_id, str) and self._ID.match(call_id) else None
        return self._detected(Draft(name, f"{self.opening} {written}", own), number)


class LlamaParser(DetectorParser):
    """Llama 3: a JSON object of ``name`` and ``parameters`` as the whole turn, or after ``<|python_tag|>``."""

    name = "llama3"
    detector = ("llama32_detector", "Llama32Detector")
    opening, closing = "<|python_tag|>", ""
    hint = 'Write {"name": "...", "parameters": {...}} and nothing else.'
    _BARE = re.compile(r"\s*(?=\{)")

    def parse(self, text: str) -> Parsed:
        return self._checked(self._scan(text, {self.opening: ""}, self._BARE))

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
                calls.append(ToolCall("", {}, self.call_id(number + len(calls)), str(problem)))
                return calls, len(text)
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
        return "parameters" in value or "arguments" in value or value["name"] in self._names

    def _object(self, value: Any, number: int) -> ToolCall:
        name = ""
        try:
            if not isinstance(value, dict):
                raise Malformed(f"a call is a JSON object, got {kind(value)}")
            name = read_name(value)
            key = "parameters" if "parameters" in value else "arguments"
            written = json.dumps({"name": name, "parameters": read_arguments(value.get(key, {}), key)})
            return self._detected(Draft(name, self.opening + written), number)
        except Malformed as problem:
            return ToolCall(name, {}, self.call_id(number), str(problem))


def _meant_as_call(text: str, start: int) -> bool:
    """Whether broken JSON was a call rather than an answer."""
    return (
        text.find('"name"', start) >= 0 and max(text.find('"parameters"', start), text.find('"arguments"', start)) >= 0
    )


def _object_text(text: str) -> str:
    """The one JSON object in ``text``, written again in ASCII.

    Raises:
        Malformed: there is something else.
    """
    value, end = read_json(text)
    if text[end:].strip():
        raise Malformed("text after the arguments: write one JSON object in each call")
    if not isinstance(value, dict):
        raise Malformed(f"the arguments must be a JSON object, got {kind(value)}")
    return json.dumps(read_arguments(value))


FAMILIES: dict[str, type[DetectorParser]] = {
    parser.name: parser
    for parser in (
        GlmParser,
        Glm47Parser,
        Qwen3CoderParser,
        DeepSeekV3Parser,
        DeepSeekV31Parser,
        KimiParser,
        MistralParser,
        LlamaParser,
    )
}
