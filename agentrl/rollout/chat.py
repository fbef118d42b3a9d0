"""Messages to prompt ids, by the model's own chat template, without ever re-tokenizing what was sampled.

The first prompt of a segment is rendered whole. After an assistant turn only the *extension* is
encoded: what the template puts between the sampled text and the next assistant turn. It is found
by rendering a small dummy conversation of the same shape once, so a turn's cost does not grow with
the history. The same dummy shows whether the template *can* extend: one that drops or rewrites
what came before (Qwen3 strips reasoning at a new user message) cannot, and the caller then opens a new segment.

Templates run in transformers' jinja sandbox; content is encoded by provenance (:mod:`agentrl.rollout.encoding`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.errors import ConfigError, EnvError
from agentrl.rollout.encoding import ProvenanceTokenizer
from agentrl.rollout.extension import ExtensionPlanner, Shape
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.rollout.conversation import Conversation
    from agentrl.tools.parsers import Parsed

INLINE = "inline"
"""Role of an observation that continues the assistant's turn as it is, without template text around it
(Search-R1's ``<information>`` blocks)."""

_KEPT_PROMPTS = 64
_REASONING_END = "</think>"
_OPENED_REASONING = re.compile(r"<think(?:ing)?>\s*\Z")
Tools = Sequence[dict[str, Any]] | None


class ChatTemplate:
    """The chat template and tokenizer of one model.

    Args:
        tokenizer: directory (or hub name) of a checkpoint, or a fast transformers tokenizer.
        chat_template: jinja source that replaces the tokenizer's own.

    Raises:
        ConfigError: no fast tokenizer or no chat template there.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self._hf = _load_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{self._name} has no fast tokenizer (tokenizer.json); convert it with transformers")
        self._template = chat_template or self._hf.chat_template
        if not self._template:
            raise ConfigError(
                f"{self._name} has no chat template; put chat_template.jinja beside its tokenizer or pass one"
            )
        self.encoder = ProvenanceTokenizer(backend)
        self._prompts: dict[str, np.ndarray] = {}
        self.end_of_turn_id = self._end_of_turn()
        """The control token that the template puts after an assistant message, if it does."""
        self.eos_token_ids: tuple[int, ...] = self._all_eos()
        self._eos = frozenset(self.eos_token_ids)
        self._planner = ExtensionPlanner(self._render, self._eos_texts())
        self.opening = self._opened_reasoning()

    @property
    def template_source(self) -> str:
        """The jinja source in use (of a named set, the one for tools)."""
        if isinstance(self._template, dict):
            return self._template.get("tool_use") or self._template["default"]
        return self._template

    @cached_property
    def call_format(self) -> str:
        """Name of the tool-call parser that fits this template, see :mod:`agentrl.tools.parsers`."""
        from agentrl.tools.parsers import detect_format

        return detect_format(self.template_source)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> np.ndarray:
        """int32 ``[n]``, read-only: the whole conversation and the opening of an assistant turn.

        Raises:
            EnvError: the template refuses these messages (roles, order, missing fields).
        """
        # The episodes of a group open with the same words: encode them once.
        key = repr((messages, tools))
        ids = self._prompts.pop(key, None)
        if ids is None:
            sealed = self.encoder.seal_all(_join_inline(messages))
            ids = self.encoder.encode(self._render(sealed, self.encoder.seal_all(tools)))
            ids.flags.writeable = False
            if len(self._prompts) >= _KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        self._prompts[key] = ids  # the most recent one last
        return ids

    def raw_prompt(self, text: str) -> np.ndarray:
        """int32 ``[n]``: ``text`` as it is, without the template; no special token is added.

        The text is the user's own prompt, so control tokens written in it are control tokens.

        Raises:
            EnvError: the text is empty.
        """
        ids = self.encoder.encode(text.encode("utf-8", "replace").decode("utf-8"))
        if not len(ids):
            raise EnvError("a prompt without chat template is empty; give at least one token of text")
        return ids

    def extension(
        self,
        prev_assistant: Message,
        sampled: np.ndarray,
        new_messages: Sequence[Message],
        tools: Tools = None,
        *,
        earlier: tuple[str, ...] | None = None,
    ) -> np.ndarray | None:
        """int32 ``[m]``: what follows the sampled ids up to the next assistant turn.

        Args:
            prev_assistant: the message parsed from the sampled ids.
            sampled: its ids; when they end with the template's end-of-turn token it is not repeated.
            new_messages: the observation.
            earlier: roles of the messages that followed an earlier turn with reasoning in this
                segment; None when there was none.

        Returns:
            None when the template would change what is already there: re-render in a new segment.
        """
        if all(m["role"] == INLINE for m in new_messages):
            return self.encoder.encode_content("".join(m["content"] for m in new_messages))
        sealed = [self.encoder.seal_all(_plain(m)) for m in new_messages]
        suffix = self._planner.suffix(Shape.of(prev_assistant, sealed, bool(tools), earlier), sealed)
        if suffix is None:
            return None
        ids = self.encoder.encode_after_control(suffix)
        if len(ids) and len(sampled) and ids[0] == sampled[-1] and int(ids[0]) in self._eos:
            return ids[1:]
        return ids

    def conversation(self, **parts: Any) -> Conversation:
        """A conversation in this template; ``parts`` are the other arguments of :class:`Conversation`."""
        from agentrl.rollout.conversation import Conversation

        return Conversation(chat=self, **parts)

    def text(self, sampled: np.ndarray, opening: str | None = None) -> str:
        """The sampled text as parsers and environments get it.

        Without the end-of-turn token, and with the reasoning tag that the prompt opened: ``opening``, or
        the generation prompt's.
        """
        end = len(sampled)
        while end and int(sampled[end - 1]) in self._eos:
            end -= 1
        return (self.opening if opening is None else opening) + self.encoder.decode(sampled[:end])

    def history_message(self, text: str, parsed: Parsed, call_format: str) -> Message:
        """The assistant message that stands for ``text`` when the history is rendered again.

        A format that is not the template's own (``tags:...``) is text to the template: the words stay as
        they were written.
        """
        if call_format == self.call_format:
            return parsed.message()
        message = Message(role="assistant", content=text.rpartition(_REASONING_END)[2].lstrip("\n"))
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        return message

    def decode(self, ids: np.ndarray) -> str:
        """The text of ``ids``, control tokens included."""
        return self.encoder.decode(ids)

    @property
    def _name(self) -> str:
        return str(getattr(self._hf, "name_or_path", "") or type(self._hf).__name__)

    def _render(self, messages: Sequence[dict[str, Any]], tools: Tools, *, generation: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            return self._hf.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._template if isinstance(self._template, str) else None,
                add_generation_prompt=generation,
                tokenize=False,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise EnvError(
                f"the chat template of {self._name} cannot render messages with roles [{roles}]: {error}. "
                f"Use roles and fields that this template knows, or pass another chat_template"
            ) from error

    def _end_of_turn(self) -> int | None:
        mark = "endofturnprobe"
        turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": mark}]
        rendered = self._render(turn, None, generation=False)
        tail = rendered[rendered.rfind(mark) + len(mark) :].lstrip()
        ends = [text for text in self.encoder.control_ids if tail.startswith(text)]
        return self.encoder.control_ids[max(ends, key=len)] if ends else None

    def _all_eos(self) -> tuple[int, ...]:
        """The end-of-turn token and what the checkpoint declares."""
        found: list[int | None] = [self.end_of_turn_id]
        for name in ("generation_config.json", "config.json"):
            path = Path(self._name) / name
            if path.is_file():
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
                found += value if isinstance(value, list) else [value]
        found.append(self._hf.eos_token_id)
        return tuple(dict.fromkeys(int(i) for i in found if i is not None))

    def _eos_texts(self) -> tuple[str, ...]:
        return tuple(text for text, index in self.encoder.control_ids.items() if index in self._eos)

    def _opened_reasoning(self) -> str:
        return opened_reasoning(self._render([{"role": "user", "content": "u"}], None))


def opened_reasoning(prompt: str) -> str:
    """The reasoning tag that ``prompt`` ends with; empty when it ends with none."""
    opened = _OPENED_REASONING.search(prompt)
    return opened.group() if opened else ""


def _load_tokenizer(path: str | os.PathLike[str]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(os.fspath(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer can be read from {os.fspath(path)!r}: {error}") from error


def _join_inline(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as the template takes it: an inline observation is part of the assistant's message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        follows_inline = bool(joined) and joined[-1].pop("_open", False)
        if message["role"] == INLINE or (message["role"] == "assistant" and follows_inline):
            if not joined or joined[-1]["role"] != "assistant":
                raise EnvError("an inline observation must follow an assistant message")
            joined[-1]["content"] += message["content"]
            joined[-1]["_open"] = message["role"] == INLINE
        else:
            joined.append(_plain(message))
    if joined:
        joined[-1].pop("_open", None)
    return joined


def _plain(message: Message) -> dict[str, Any]:
    """A copy with string content and tool-call arguments as a mapping, as templates expect them."""
    plain = dict(message)
    plain["content"] = plain.get("content") or ""
    calls = plain.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {"name": call.get("name", ""), "arguments": call.get("arguments", {})})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            function["arguments"] = {"arguments": function["arguments"]}
    return {**call, "type": "function", "function": function}
