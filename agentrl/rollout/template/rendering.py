"""Runs a model's chat template, and gives it messages in the form that it takes.

Templates of different families want the same conversation in different clothes: arguments of a call as a mapping or
as JSON text, an empty content as ``""`` or as ``None``, no system role, strictly alternating roles. What a
template wants is found by asking it, with a conversation made up for the purpose.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl.errors import ConfigError, EnvError
from agentrl.types import Message

log = logging.getLogger(__name__)

INLINE = "inline"
"""Role of an observation that continues the assistant's turn as it is, without template text around it
(Search-R1's ``<information>`` blocks)."""

Tools = Sequence[dict[str, Any]] | None
_PROBE_TOOL = {"name": "probename", "description": "probe", "parameters": {"type": "object", "properties": {}}}
_PROBE_TOOLS = [{"type": "function", "function": _PROBE_TOOL}]


@dataclass(frozen=True)
class CallForm:
    """In which form a template takes an assistant message with calls."""

    arguments_as_text: bool = False
    no_content: str | None = ""


_CALL_FORMS = [CallForm(as_text, nothing) for as_text in (False, True) for nothing in ("", None)]


class Renderer:
    """The chat template of one model: jinja source, a set of named ones, or None; with a transformers tokenizer."""

    def __init__(
        self,
        hf: Any,
        template: str | dict[str, str] | None,
        name: str,
        variables: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        self._hf, self._template, self._name = hf, template, name
        self.variables, self.date = dict(variables or {}), date
        self._globals: dict[str, Any] = {}
        if date is not None:
            self._globals["strftime_now"] = datetime.datetime.combine(date, datetime.time()).strftime

    def with_variables(self, variables: Mapping[str, Any]) -> Renderer:
        """The same template with other variables."""
        return Renderer(self._hf, self._template, self._name, variables, self.date)

    @property
    def source(self) -> str:
        """The jinja source in use (of a named set, the one for tools); empty without one."""
        if isinstance(self._template, dict):
            return self._template.get("tool_use") or self._template["default"]
        return self._template or ""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None, *, generation: bool = True) -> str:
        """The conversation as text.
        Raises ConfigError: there is no template.
        Raises EnvError: the template refuses these messages."""
        return self._run([self._dressed(message) for message in messages], tools, generation)

    def probe(self, messages: Sequence[dict[str, Any]], *, generation: bool = True) -> str:
        """As :meth:`render`, to learn from; with a made-up tool for a template that knows no conversation without."""
        try:
            return self.render(messages, generation=generation)
        except EnvError:
            return self.render(messages, _PROBE_TOOLS, generation=generation)

    def accepted(
        self, messages: Sequence[dict[str, Any]], tools: Tools = None, *, generation: bool = True
    ) -> tuple[list[dict[str, Any]], str]:
        """Messages in a form that the template takes, and their text: what it refuses is tried again in the forms of
        strict templates, :func:`one_call_at_a_time`, :func:`conformed`, and both.
        Raises ConfigError: there is no template.
        Raises EnvError: the template refuses these messages."""
        refused: EnvError | None = None
        single = one_call_at_a_time(messages)
        tried: list[list[dict[str, Any]]] = []
        for form in (list(messages), single, conformed(messages), conformed(single)):
            if form in tried:
                continue
            tried.append(form)
            try:
                return form, self.render(form, tools, generation=generation)
            except EnvError as error:
                refused = refused or error
        assert refused is not None  # the messages as they are were tried
        raise refused

    def _dressed(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message in the form that the template takes."""
        if message.get("tool_calls"):
            message = _in_form(message, self.call_form)
        if message.get("reasoning_content") and self.reasoning_key != "reasoning_content":
            message = {self.reasoning_key if key == "reasoning_content" else key: v for key, v in message.items()}
        return message

    @cached_property
    def omits_calls(self) -> bool:
        """Whether the template leaves out the calls of a message, and takes them as part of its content."""
        text = self._try([_in_form(turn, self.call_form) for turn in _probe_turns()], None)
        return "probeseen" in text and "probevalue" not in text

    @cached_property
    def reasoning_key(self) -> str:
        """The field of a message in which the template looks for what was thought."""
        call = {"id": "probe0000", "type": "function", "function": {"name": "probename", "arguments": {}}}
        for key in ("reasoning_content", "thinking", "reasoning"):
            for said in ({"content": "", "tool_calls": [call]}, {"content": "probe"}):
                turn = _in_form({"role": "assistant", key: "probethought", **said}, self.call_form)
                try:
                    if "probethought" in self._run([{"role": "user", "content": "probe"}, turn], None, False):
                        return key
                except EnvError:
                    continue
        return "reasoning_content"

    @cached_property
    def call_form(self) -> CallForm:
        """The first form in which a call gets through the template whole."""
        for form in _CALL_FORMS:
            shaped = [_in_form(turn, form) for turn in _probe_turns()]
            text = self._try(shaped, None) or self._try(shaped, _PROBE_TOOLS)
            # Python's own spelling of a dict, or text quoted once more, is not what the model was trained on.
            garbled = "'probekey'" in text or '\\"probekey' in text
            if "probevalue" in text and not garbled:
                return form
        return CallForm()

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes the tools into the prompt."""
        try:
            return "probename" in self._run([{"role": "user", "content": "u"}], _PROBE_TOOLS, True)
        except EnvError:
            return True  # it looks at them, and wants more than this

    def _try(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        """The rendering; empty when the template refuses."""
        try:
            return self._run(messages, tools, True)
        except EnvError:
            return ""

    def _run(self, messages: Sequence[Mapping[str, Any]], tools: Tools, generation: bool) -> str:
        from jinja2 import TemplateError

        if not self._template:
            raise ConfigError(
                f"{self._name} has no chat template; put chat_template.jinja beside its tokenizer or pass one. Only "
                "prompts that are sent as they are (--no-apply-chat-template) do without"
            )
        try:
            return self._hf.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._template if isinstance(self._template, str) else None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._globals,
                **self.variables,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise EnvError(
                f"the chat template of {self._name} cannot render messages with roles [{roles}]: {error}. "
                f"Use roles and fields that this template knows, or pass another chat_template"
            ) from error


def _probe_turns() -> list[dict[str, Any]]:
    function = {"name": "probename", "arguments": {"probekey": "probevalue"}}
    call = {"id": "probe0000", "type": "function", "function": function}
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "probeseen", "name": "probename", "tool_call_id": "probe0000"},
    ]


def _in_form(message: Mapping[str, Any], form: CallForm) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if form.arguments_as_text:
        texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
        calls = [
            {**call, "function": {**call["function"], "arguments": text}}
            for call, text in zip(calls, texts, strict=True)
        ]
    return {**message, "content": message["content"] or form.no_content, "tool_calls": calls}


def one_call_at_a_time(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with each call of a turn in a message of its own, before its result (Llama takes no other)."""
    result: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # messages of the turn's other calls
    for message in messages:
        if message["role"] == "tool" and waiting and result[-1]["role"] == "tool":
            result.append(waiting.pop(0))
        elif message["role"] != "tool":
            waiting = []
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            rest = {key: value for key, value in message.items() if key != "reasoning_content"}
            waiting = [{**rest, "content": "", "tool_calls": [call]} for call in calls[1:]]
            message = {**message, "tool_calls": calls[:1]}
        result.append(message)
    return result


def conformed(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for templates that are strict about roles.

    A system text is put before the first question, the answer to a call that could not be read comes from the user,
    and what follows in the same role is one message.
    """
    result: list[dict[str, Any]] = []
    called = False
    for message in messages:
        role = message["role"]
        if role == "assistant":
            called = bool(message.get("tool_calls"))
        elif role == "system" or (role == "tool" and not called):
            role = "user"
        if role == "user" and result and result[-1]["role"] == "user":
            result[-1] = {"role": "user", "content": f"{result[-1]['content']}\n\n{message['content']}"}
        else:
            result.append(
                {**message, "role": role} if role == message["role"] else {"role": role, "content": message["content"]}
            )
    return result


def joined(messages: Sequence[dict[str, Any]], between: str = "") -> list[dict[str, Any]]:
    """The conversation, in plain form, as templates take it: an inline observation is part of the assistant's message,
    with ``between`` before it.
    Raises EnvError: an inline observation follows no assistant message."""
    result: list[dict[str, Any]] = []
    inline = False  # whether the last message was one
    for message in messages:
        if message["role"] == INLINE or (message["role"] == "assistant" and inline):
            if not result or result[-1]["role"] != "assistant":
                raise EnvError("an inline observation must follow an assistant message")
            result[-1]["content"] += between + message["content"]
        else:
            result.append(dict(message))
        inline = message["role"] == INLINE
    return result


def plain(message: Message) -> dict[str, Any]:
    """A copy with string content and tool-call arguments as a mapping."""
    copied: dict[str, Any] = dict(message)
    copied["content"] = copied.get("content") or ""
    calls = copied.get("tool_calls")
    if calls:
        copied["tool_calls"] = [_plain_call(call) for call in calls]
    return copied


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {"name": call.get("name", ""), "arguments": call.get("arguments", {})})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            function["arguments"] = {"arguments": function["arguments"]}
    return {**call, "type": "function", "function": function}
