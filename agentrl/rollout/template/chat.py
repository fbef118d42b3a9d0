"""Messages to prompt ids, by the model's own chat template, without ever re-tokenizing what was sampled.

The first prompt of a segment is rendered whole. After an assistant turn only the *extension* is
encoded: what the template puts between the sampled text and the next assistant turn. It is found
by rendering a small dummy conversation of the same shape once, so a turn's cost does not grow with
the history. The same dummy shows whether the template *can* extend: one that drops or rewrites what came before
(Qwen3 strips reasoning at a new user message, QwQ's history knows nothing of the ``<think>`` that its generation
prompt ends with) cannot, and the caller then opens a new segment.

Templates run in transformers' jinja sandbox; :mod:`~agentrl.rollout.template.encoding` encodes content by provenance.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.errors import ConfigError, EnvError
from agentrl.processes.imports import compiler_left_out, uncollected
from agentrl.rollout.template.encoding import ProvenanceTokenizer
from agentrl.rollout.template.extension import Earlier, ExtensionPlanner
from agentrl.rollout.template.rendering import INLINE, Renderer, Tools, joined, plain
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.rollout.conversation import Conversation
    from agentrl.rollout.template.check import Trial
    from agentrl.tools.formats import Parsed, Parser

__all__ = ["INLINE", "ChatTemplate", "opened_reasoning"]

log = logging.getLogger(__name__)

_KEPT_PROMPTS = 64
_KEPT_VARIANTS = 64  # of variables: tasks may bring their own
_REASONING_END = "</think>"
_TAIL = 16  # ids at the end of a prompt in which a reasoning tag is looked for
_OPENED_REASONING = re.compile(r"<think(?:ing)?>\s*\Z")
_GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_TAKEN_AS_THEY_ARE = ("llama", "qwen3")  # with some others (qwen2) transformers takes a class of theirs all the same
_END_OF_MESSAGE = "<|eom_id|>"  # how Llama ends a turn that waits for a tool; not every checkpoint declares it


class ChatTemplate:
    """The chat template and tokenizer of one model.

    Args:
        tokenizer: directory (or hub name) of a checkpoint, or a fast transformers tokenizer.
        chat_template: jinja source that replaces the tokenizer's own.
        variables: what else the template gets to see (``--apply-chat-template-kwargs``).
        date: what a template that writes the date of the day takes for today; None: the day of each rendering.

    Without a chat template only :meth:`raw_prompt` and inline observations work.

    Raises:
        ConfigError: no fast tokenizer there.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        self._hf = _load_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{self.name} has no fast tokenizer (tokenizer.json); convert it with transformers")
        template = chat_template or self._hf.chat_template
        self.renderer = Renderer(self._hf, template, self.name, variables, date)
        self.encoder = ProvenanceTokenizer(backend)
        self._prompts: dict[Any, np.ndarray] = {}
        self._variants: dict[str, ChatTemplate] = {}
        self._id_ends: dict[int, str] = {}  # last character of an id's text, white space aside
        self._warned = False
        self.end_of_turn_id: int | None = None
        """The control token that the template puts after an assistant message, if it does."""
        self.eos_token_ids: tuple[int, ...] = self._all_eos()
        self._eos = frozenset(self.eos_token_ids)
        self.every_control = frozenset(self.encoder.control_ids)
        """What text of the author may hold."""
        self._planner = self._new_planner()
        self.opening = self._opened_reasoning() if self.template_source else ""
        """The reasoning tag that the template's first generation prompt ends with; empty when it ends with none."""

    def with_variables(self, variables: Mapping[str, Any] | None) -> ChatTemplate:
        """The same template with these variables over its own: those of one task."""
        if not variables or not self.template_source:
            return self
        merged = {**self.renderer.variables, **variables}
        if merged == self.renderer.variables:
            return self
        key = json.dumps(merged, sort_keys=True)
        found = self._variants.get(key)
        if found is None:
            found = copy.copy(self)
            found.renderer = self.renderer.with_variables(merged)
            found._prompts, found._variants, found._planner = {}, {}, found._new_planner()
            found.opening = found._opened_reasoning()
            if len(self._variants) >= _KEPT_VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._variants[key] = found
        return found

    def _new_planner(self) -> ExtensionPlanner:
        return ExtensionPlanner(self.renderer.render, tuple(self.encoder.control_ids), self._eos_texts())

    @property
    def template_source(self) -> str:
        """The jinja source in use (of a named set, the one for tools); empty without a chat template."""
        return self.renderer.source

    @cached_property
    def call_format(self) -> str:
        """Name of the tool-call parser that fits this template, see :mod:`agentrl.tools.formats`.

        ``none`` where the template takes no tools, or renders a call that no parser here reads back.
        """
        return self.trial.call_format if self.trial is not None and self.trial.holds else "none"

    @cached_property
    def trial(self) -> Trial | None:
        """How the call format that the template seems to ask for reads what it renders; None when it asks for none."""
        from agentrl.rollout.template.check import Trial, try_format
        from agentrl.tools.formats import detect_format

        name = detect_format(self.template_source)
        if name == "none":
            return None
        if self.renderer.omits_calls:
            return Trial(name, "", "a call is part of the content", holds=True, exact=True)
        return try_format(self.renderer, name)

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""
        return bool(self.template_source) and self.renderer.shows_tools

    @cached_property
    def _parser(self) -> Parser:
        """The parser of :attr:`call_format`: its marks of reasoning are the template's."""
        from agentrl.tools.formats import get_parser

        return get_parser(self.call_format)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        controls: Sequence[frozenset[str]] = (),
    ) -> np.ndarray:
        """int32 ``[n]``, read-only: the whole conversation and the opening of an assistant turn. ``controls``: for each
        message the control tokens that its text may hold, see :attr:`every_control`; none where it says nothing.
        Raises ConfigError: the model has no chat template.
        Raises EnvError: the template refuses these messages (roles, order, missing fields)."""
        # The episodes of a group open with the same words: encode them once.
        key = (repr((messages, tools)), tuple(controls))
        ids = self._prompts.pop(key, None)
        if ids is None:
            if tools and not self.renderer.shows_tools:
                self._warn_of_hidden_tools()
            seal = self.encoder.seal_all
            owned = itertools.chain(controls, itertools.repeat(frozenset()))
            pairs = zip(messages, owned, strict=False)
            sealed = joined([seal(plain(message), own) for message, own in pairs], self.encoder.boundary)
            ids = self.encoder.encode(self.renderer.accepted(sealed, seal(tools))[1])
            ids.flags.writeable = False
            if len(self._prompts) >= _KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        self._prompts[key] = ids  # the most recent one last
        return ids

    def raw_prompt(self, text: str) -> np.ndarray:
        """int32 ``[n]``: ``text`` as it is, without the template; no special token is added.

        The text is the user's own prompt, so control tokens written in it are control tokens.

        Raises EnvError: the text is empty."""
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
        said: str | None = None,
        earlier: tuple[Earlier, ...] = (),
        system: bool = False,
    ) -> np.ndarray | None:
        """int32 ``[m]``: what follows the sampled ids up to the next assistant turn.

        Args:
            prev_assistant: the message parsed from the sampled ids.
            sampled: its ids; when they end with the template's end-of-turn token it is not repeated.
            new_messages: the observation.
            said: their text without what ends the turn, where it is known.
            earlier: the turns before this one, one of each kind, the latest last.
            system: whether the conversation begins with a system message.

        Returns:
            None when the template writes what is already there in another way: re-render in a new segment.
        """
        if not new_messages or (new_messages[0]["role"] == INLINE and all([m["role"] == INLINE for m in new_messages])):
            return self.encoder.encode_content("".join(m["content"] for m in new_messages))
        sealed = list(map(self.encoder.seal_all, map(plain, new_messages)))
        end = self._end_of_text(sampled)
        said = self.encoder.decode(sampled[:end]) if said is None else said
        shape = self._planner.shape(prev_assistant, said, sealed, bool(tools), earlier, system)
        calls = prev_assistant.get("tool_calls") or ()
        suffix = self._planner.suffix(shape, sealed, (self.encoder.seal(call["function"]["name"]) for call in calls))
        if suffix is None:
            return None
        ids = self.encoder.encode_after_control(suffix)
        if end == len(sampled):
            return ids
        ended = sampled[end:].tolist()
        if len(ids) and ended in ([int(ids[0])], [self.encoder.control_ids.get(_END_OF_MESSAGE)]):
            return ids[1:]
        return None  # the template ends this turn in another way

    def conversation(self, **parts: Any) -> Conversation:
        """A conversation in this template; ``parts`` are the other arguments of :class:`Conversation`."""
        from agentrl.rollout.conversation import Conversation

        return Conversation(chat=self, **parts)

    def text(self, sampled: np.ndarray, opening: str | None = None) -> str:
        """The sampled text as parsers and environments get it.

        Without the end-of-turn token, with all other control tokens (those of a call among them), and with the
        reasoning tag that the prompt opened: ``opening``, or the first generation prompt's.
        """
        said = self.encoder.decode(sampled[: self._end_of_text(sampled)])
        return self._parser.plain((self.opening if opening is None else opening) + said)

    def _end_of_text(self, sampled: np.ndarray) -> int:
        """Where the tokens begin that end the turn."""
        end = len(sampled)
        while end and int(sampled[end - 1]) in self._eos:
            end -= 1
        return end

    def history_message(self, text: str, parsed: Parsed, call_format: str) -> Message:
        """The assistant message that stands for ``text`` when the history is rendered again.

        A format that is not the template's own (``tags:...``) is text to the template: the words stay as
        they were written.
        """
        if call_format == self.call_format and not self.renderer.omits_calls:
            return parsed.message()
        message = Message(role="assistant", content=text.rpartition(_REASONING_END)[2].lstrip("\n"))
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        return message

    def opening_of(self, prompt: np.ndarray) -> str:
        """The reasoning tag that a prompt's ids end with; empty when they end with none."""
        for index in prompt[: -_TAIL - 1 : -1].tolist():
            text = self._id_ends.get(index)
            if text is None:
                text = self._id_ends[index] = self.encoder.decode(np.array([index], np.int32)).rstrip()[-1:]
            if text:  # what comes before the white space at the end
                return self._opened(self.decode(prompt[-_TAIL:])) if text in self._tag_ends else ""
        return ""

    def decode(self, ids: np.ndarray) -> str:
        """The text of ``ids``, control tokens included."""
        return self.encoder.decode(ids)

    @property
    def name(self) -> str:
        """What errors call the model."""
        return str(getattr(self._hf, "name_or_path", "") or type(self._hf).__name__)

    def _warn_of_hidden_tools(self) -> None:
        if not self._warned:
            log.warning(
                "the chat template of %s does not tell the model which tools there are; describe them and how they "
                "are called in the system prompt, or give a template that does",
                self.name,
            )
        self._warned = True

    def _end_of_turn(self, declared: set[int]) -> int | None:
        """The token that closes an assistant message: of its closing tokens the one that is declared, else the last."""
        last = self._after_turn([])
        try:
            # What stands there whether or not somebody speaks next: the opening of another message is no end.
            shared = os.path.commonprefix([last, self._after_turn([{"role": "user", "content": "u"}])])
        except EnvError:
            shared = last
        closing = self._controls(shared) or self._controls(last)[:1]
        return next((index for index in closing if index in declared), closing[-1] if closing else None)

    def _after_turn(self, following: list[dict[str, Any]]) -> str:
        """What is rendered behind the words of an assistant message which ``following`` follow."""
        mark = "endofturnprobe"
        turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": mark}, *following]
        return self.renderer.probe(turn, generation=False).rpartition(mark)[2]

    def _controls(self, text: str) -> list[int]:
        return [self.encoder.control_ids[found] for found in self.encoder.controls_in(text)]

    def _all_eos(self) -> tuple[int, ...]:
        """What the checkpoint declares, and the token that closes a message."""
        found: list[int | None] = []
        for name in ("generation_config.json", "config.json"):
            path = Path(self.name) / name
            if path.is_file():
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
                found += value if isinstance(value, list) else [value]
        found.append(self._hf.eos_token_id)
        found += [self.encoder.control_ids.get(text) for text in self._parser.ends]
        if self.template_source:
            self.end_of_turn_id = self._end_of_turn({index for index in found if index is not None})
            found.insert(0, self.end_of_turn_id)
            if self.end_of_turn_id is None:
                # GLM ends a turn by the token that opens the next one, whoever speaks there.
                found += [self.next_turn(role) for role in ("user", "tool")]
        return tuple(dict.fromkeys(int(i) for i in found if i is not None))

    def next_turn(self, role: str) -> int | None:
        """The token that opens a message of ``role`` after one of the assistant; None where the template has none."""
        try:
            next_turn = self._after_turn([{"role": role, "content": "u", "name": "u", "tool_call_id": "u00000000"}])
            return next(iter(self._controls(next_turn)), None)
        except EnvError:  # a result without a call, which many templates refuse
            return None

    def _eos_texts(self) -> tuple[str, ...]:
        return tuple(text for text, index in self.encoder.control_ids.items() if index in self._eos)

    def _opened_reasoning(self) -> str:
        return self._opened(self.renderer.probe([{"role": "user", "content": "u"}]))

    def _opened(self, prompt: str) -> str:
        """The reasoning tag that ``prompt`` ends with, as environments get it."""
        return opened_reasoning(self._parser.plain(prompt))

    @cached_property
    def _tag_ends(self) -> frozenset[str]:
        return frozenset(tag.rstrip()[-1] for tag in (*self._parser.reasoning_tags, "<thinking>"))


def opened_reasoning(prompt: str) -> str:
    """The reasoning tag that ``prompt`` ends with; empty when it ends with none."""
    opened = _OPENED_REASONING.search(prompt)
    return opened.group() if opened else ""


def _load_tokenizer(path: str | os.PathLike[str]) -> Any:
    try:
        with uncollected():
            if _is_described_by_file(Path(path)):
                from transformers import PreTrainedTokenizerFast

                return PreTrainedTokenizerFast.from_pretrained(os.fspath(path))
            with compiler_left_out():
                from transformers import AutoTokenizer

                return AutoTokenizer.from_pretrained(os.fspath(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer can be read from {os.fspath(path)!r}: {error}") from error


def _is_described_by_file(folder: Path) -> bool:
    """Whether ``tokenizer.json`` says all, and no class of the model's own is asked for.

    transformers comes to the same, but imports torch and half of itself in order to find out.
    """
    names = ("config.json", "tokenizer_config.json")
    try:
        model, tokenizer = (json.loads((folder / name).read_text(encoding="utf-8")) for name in names)
    except (OSError, ValueError):  # transformers has the words for it
        return False
    generic = tokenizer.get("tokenizer_class") in _GENERIC_TOKENIZERS and "auto_map" not in tokenizer
    return generic and model.get("model_type") in _TAKEN_AS_THEY_ARE
