"""The formats of families that write arguments between tags, each as its published chat template writes it.

Values are typed by the tool's schema, save where the family writes the type itself.
"""

from __future__ import annotations

import re
from typing import ClassVar

from agentrl.tools.formats.framed import TaggedParser


class GlmParser(TaggedParser):
    """GLM-4.5 and 4.6: the name on a line, then a key and a value on a line each."""

    name = "glm"
    opening, closing = "<tool_call>", "</tool_call>"
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    form = "NAME, and for each argument <arg_key>KEY</arg_key> and then <arg_value>value</arg_value>"
    # Models also write the two characters \n where the template has a line's end.
    head = re.compile(r"\s*+(?P<name>[^<\s\\]{1,256})(?:\\n|\s)*+")
    argument = re.compile(r"(?:\\n|\s)*+<arg_key>(?P<key>[^<]{1,256})</arg_key>(?:\\n|\s)*+<arg_value>")
    value_end = "</arg_value>"
    tail = re.compile(r"(?:\\n|\s)*+</tool_call>")


class Glm47Parser(GlmParser):
    """GLM-4.7 and 5: as GLM-4.5 without line ends."""

    name = "glm47"


class HunyuanParser(GlmParser):
    """Hunyuan (Hy3): as GLM, with a section around the calls, and a suffix in each tag."""

    name = "hunyuan"
    section = ("<tool_calls>", "</tool_calls>")
    hint = (
        "Write <tool_calls:opensource><tool_call:opensource>NAME<tool_sep:opensource>, for each argument "
        "<arg_key:opensource>KEY</arg_key:opensource><arg_value:opensource>value</arg_value:opensource>, and "
        "</tool_call:opensource></tool_calls:opensource>."
    )
    form = "NAME<tool_sep>, and for each argument <arg_key>KEY</arg_key><arg_value>value</arg_value>"
    head = re.compile(r"\s*+(?P<name>[^<\s]{1,256})\s*+<tool_sep>")
    reasoning_tags: ClassVar = {**GlmParser.reasoning_tags, "<think:opensource>": "</think:opensource>"}
    _SUFFIX = re.compile(r"(</?(?:tool_calls?|tool_sep|arg_key|arg_value)):\w+>")

    def plain(self, text: str) -> str:
        return self._SUFFIX.sub(r"\1>", super().plain(text))


class Qwen3CoderParser(TaggedParser):
    """Qwen3-Coder, Qwen3.5, Nemotron 3: ``<function=name>`` with ``<parameter=key>`` blocks."""

    name = "qwen3_coder"
    opening, closing = "<tool_call>", "</tool_call>"
    inner = ("<function=", "</function>")
    form = "<function=NAME>, <parameter=KEY>value</parameter> for each argument, and one </function>"
    head = re.compile(r"\s*+<function=(?P<name>[^>\n<]{1,256})>")
    argument = re.compile(r"\s*+<parameter=(?P<key>[^>\n]{1,256})>")
    value_end = "</parameter>"
    tail = re.compile(r"\s*+</function>\s*+</tool_call>")
    lines = True


class SeedParser(Qwen3CoderParser):
    """Seed-OSS: as Qwen3-Coder, in tags of its own."""

    name = "seed_oss"
    opening, closing = "<seed:tool_call>", "</seed:tool_call>"
    tail = re.compile(r"\s*+</function>\s*+</seed:tool_call>")
    reasoning_tags: ClassVar = {**Qwen3CoderParser.reasoning_tags, "<seed:think>": "</seed:think>"}
    lines = False


class MinimaxM2Parser(TaggedParser):
    """MiniMax-M2: ``<invoke name="...">`` with ``<parameter name="...">`` in it, all calls in one section."""

    name = "minimax-m2"
    opening, closing = '<invoke name="', "</invoke>"
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    inner = ("<parameter name=",)
    form = '<invoke name="NAME">, <parameter name="KEY">value</parameter> for each argument, and </invoke>'
    head = re.compile(r'(?P<name>[^"\n<]{1,256})">')
    argument = re.compile(r'\s*+<parameter name="(?P<key>[^"\n]{1,256})">')
    value_end = "</parameter>"
    tail = re.compile(r"\s*+</invoke>")


class DeepSeekV32Parser(TaggedParser):
    """DeepSeek-V3.2: as MiniMax, in tokens of its own, and each value says whether it is text or JSON."""

    name = "deepseekv32"
    opening, closing = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    inner = ("<｜DSML｜parameter name=",)
    form = (
        '<｜DSML｜invoke name="NAME">, <｜DSML｜parameter name="KEY" string="true|false">value'
        "</｜DSML｜parameter> for each argument, and </｜DSML｜invoke>"
    )
    head = re.compile(r'(?P<name>[^"\n<]{1,256})">')
    argument = re.compile(
        r'\s*+<｜DSML｜parameter name="(?P<key>[^"\n]{1,256})"(?: string="(?:(?P<text>true)|false)")?>'
    )
    value_end = "</｜DSML｜parameter>"
    tail = re.compile(r"\s*+</｜DSML｜invoke>")


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek-V4: as V3.2 in another section."""

    name = "deepseekv4"
    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")


class KimiK3Parser(TaggedParser):
    """Kimi-K3: elements opened and closed by tokens; each argument has its type."""

    name = "kimi_k3"
    opening, closing = "<|open|>call ", "<|close|>call<|sep|>"
    section = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
    inner = ("<|open|>argument ",)
    form = (
        '<|open|>call tool="NAME" index="1"<|sep|>, <|open|>argument key="KEY" type="TYPE"<|sep|>value'
        "<|close|>argument<|sep|> for each argument, and <|close|>call<|sep|>"
    )
    head = re.compile(r'tool="(?P<name>[^"<]{1,512})"(?: index="\d+")?<\|sep\|>')
    argument = re.compile(r'\s*+<\|open\|>argument key="(?P<key>[^"]{1,512})" type="(?:(?P<text>string)|\w+)"<\|sep\|>')
    value_end = "<|close|>argument<|sep|>"
    tail = re.compile(r"\s*+<\|close\|>call<\|sep\|>")
    reasoning_tags: ClassVar = {**TaggedParser.reasoning_tags, "<|open|>think<|sep|>": "<|close|>think<|sep|>"}
    _AROUND = re.compile(r"<\|open\|>response<\|sep\|>|<\|close\|>(?:response|message)<\|sep\|>|<\|end_of_msg\|>")

    def plain(self, text: str) -> str:
        return self._AROUND.sub("", super().plain(text))

    def _text_of(self, written: str) -> str:
        return written.replace("&quot;", '"').replace("&amp;", "&")
