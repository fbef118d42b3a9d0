"""gpt-oss (harmony): a turn is a series of messages, each on a channel."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from agentrl.tools.formats.base import Parsed
from agentrl.tools.formats.framed import EnclosedParser, json_arguments
from agentrl.tools.formats.strict_json import Malformed, short_name
from agentrl.types import ToolCall

_MESSAGE = re.compile(
    r"\s*+(?:<\|start\|>)?(?:assistant)?\s*+(?:to=(?P<first>[^\s<]{1,256})\s*+)?"
    r"<\|channel\|>(?P<channel>\w{1,64})(?:\s++to=(?P<second>[^\s<]{1,256}))?\s*+(?:<\|constrain\|>)?\w*+\s*+"
    r"<\|message\|>(?P<body>[^<]*+(?:(?!<\|(?:start|end|call|return)\|>)<[^<]*+)*+)(?P<end><\|(?:end|call|return)\|>)?"
)


class GptOssParser(EnclosedParser):
    """gpt-oss: reasoning on the channel ``analysis``, calls to ``functions.NAME``, the answer on ``final``."""

    name = "gpt-oss"
    opening, closing = "<|channel|>commentary to=", "<|call|>"
    inner = ("<|channel|>", "<|message|>")
    ends = ("<|return|>", "<|call|>")
    hint = "Write <|channel|>commentary to=functions.NAME <|constrain|>json<|message|> and the arguments as JSON."
    reasoning_tags: ClassVar = {**EnclosedParser.reasoning_tags, "<|channel|>analysis<|message|>": "<|end|>"}
    _HEAD = re.compile(r"(?:functions\.)?([^\s<]{1,256})\s*+(?:<\|constrain\|>)?\s*+(?:json)?\s*+<\|message\|>")

    def plain(self, text: str) -> str:
        """The reasoning between tags, the answer as it is, and calls in the one order that :meth:`_calls` reads."""
        said, at = [], 0
        while (message := _MESSAGE.match(text, at)) is not None:
            at, body = message.end(), message["body"]
            if recipient := message["first"] or message["second"]:
                said.append(f"{self.opening}{recipient} <|constrain|>json<|message|>{body}{self.closing}")
            elif message["channel"] == "analysis":
                said.append(f"<think>{body}" + ("</think>" if message["end"] else ""))
            else:
                said.append(body)
        return "".join([*said, text[at:]])

    def parse(self, text: str) -> Parsed:
        parsed = super().parse(text)
        if parsed.content and parsed.reasoning and any(call.error is None for call in parsed.tool_calls):
            # The template takes only one of them beside a call.
            return replace(parsed, content="", reasoning=f"{parsed.reasoning}\n{parsed.content}")
        return parsed

    def _calls(self, body: str, number: int) -> list[ToolCall]:
        head = self._HEAD.match(body)
        if head is None:
            raise Malformed(f"a call is {self.opening}functions.NAME <|constrain|>json<|message|> and the arguments")
        return [ToolCall(short_name(head[1]), json_arguments(body[head.end() :]), self.call_id(number))]
