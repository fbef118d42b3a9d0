"""Episodes against any OpenAI-compatible server: a conversation of messages in place of one of tokens.

The same environment and tool code runs, and the same record comes out, without tokens: ``segments`` is empty, token
counts are the server's. What differs from the token ledger, and how it is bridged:

- A server may return tool calls apart from the text. Environments get them as hermes text
  (``<tool_call>{...}</tool_call>``) behind the content, while the history keeps the server's own message, to whose
  call ids the results refer.
- Servers strip the stop string that ended a turn. It is put back, since ``</search>`` is what an environment looks for:
  the string that the server names, or the end of the last tag left open.
- The context budget counts what the server reported, with four characters a token for what came since; the first
  prompt is counted once the server has seen it. ``max_tool_output_tokens`` counts four characters a token.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from agentrl.chat_api.client import OpenAIClient
from agentrl.chat_api.refusals import ContextOverflow
from agentrl.chat_api.reply import Reply, ServerCall
from agentrl.config.schema import EvalConfig
from agentrl.config.template import template_variables
from agentrl.errors import ConfigError, EngineError
from agentrl.rollout.conversation import PLAIN_OPENING, Dialogue, EpisodeEnd, Opening, Turn
from agentrl.rollout.sampling import for_turn
from agentrl.rollout.template.rendering import INLINE
from agentrl.tools.formats import Action, HermesParser, Parsed, Parser, clean_text
from agentrl.tools.formats.strict_json import Malformed, read_json
from agentrl.types import Message, StopReason

__all__ = ["ChatConversation", "OpenAIClient", "ServerChat", "open_server", "served_model"]

CALL_FORMAT = "hermes"
_CONTACT_SECONDS = 10.0
_FOREIGN_CALLS = ("<arg_key>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "tool▁calls▁begin", "tool_calls_section")
_NO_TOKENS = np.zeros(0, np.int32)


@asynccontextmanager
async def open_server(cfg: EvalConfig) -> AsyncIterator[tuple[OpenAIClient, ServerChat]]:
    """The policy behind ``--base-url``: what an episode needs as client and chat.

    Args:
        cfg: has ``base_url``, ``model``, ``api_key_env``, ``seed``, ``rollout_concurrency`` and ``engine_timeout``.

    Raises:
        ConfigError: address, key or model cannot be used.
        EngineError: no server answers.
    """
    async with _client(cfg) as client:
        await client.choose_model(cfg.model, timeout=min(_CONTACT_SECONDS, cfg.engine_timeout))
        yield client, ServerChat(seed=cfg.seed, variables=template_variables(cfg))


def served_model(cfg: EvalConfig) -> str:
    """The model that ``cfg`` means: the one it names, or the only one that the server lists. First contact with it.

    Raises: what :func:`open_server` raises.
    """

    async def ask() -> str:
        async with _client(cfg) as client:
            return await client.choose_model(cfg.model, timeout=min(_CONTACT_SECONDS, cfg.engine_timeout))

    return asyncio.run(ask())


def _client(cfg: EvalConfig) -> OpenAIClient:
    return OpenAIClient(
        str(cfg.base_url),
        api_key=os.environ.get(cfg.api_key_env) if cfg.api_key_env else None,
        api_key_env=cfg.api_key_env or "",
        max_concurrency=cfg.rollout_concurrency,
    )


class ServerChat:
    """The server's own template, in the place of :class:`~agentrl.rollout.template.chat.ChatTemplate`.

    Args:
        seed: of sampling; each request gets one of its own, from this, the episode and the turn.
        variables: sent with each request as ``chat_template_kwargs``, which SGLang and vLLM hand to their template.
    """

    call_format = CALL_FORMAT

    def __init__(self, *, seed: int = 0, variables: Mapping[str, Any] | None = None) -> None:
        self.seed = seed
        self.variables = dict(variables or {})

    def conversation(self, *, client: OpenAIClient, parser: Parser, **parts: Any) -> ChatConversation:
        """The policy's side of one episode; ``parts`` are those of :class:`~agentrl.rollout.conversation.Dialogue`.
        Raises ConfigError: the environment insists on a model family's own call format."""
        if parser.structured and parser.name != CALL_FORMAT:
            raise ConfigError(
                f"call format {parser.name!r}: a server reads its model's calls itself, and they reach the environment "
                f"as {CALL_FORMAT!r}; leave the environment's call_format at 'auto'"
            )
        return ChatConversation(seed=self.seed, template=self.variables, client=client, parser=parser, **parts)


class ChatConversation(Dialogue):
    """A conversation of messages with a chat server: no tokens. Counts are the server's, estimated where it gives none.

    Args:
        seed: of sampling.
        template: variables of the server's chat template.
        parts: those of :class:`~agentrl.rollout.conversation.Dialogue`.
    """

    def __init__(
        self, *, client: OpenAIClient, seed: int = 0, template: Mapping[str, Any] | None = None, **parts: Any
    ) -> None:
        super().__init__(**parts)
        self._client, self._seed = client, seed
        self._variables: dict[str, Any] = dict(template or {})
        self._history: list[dict[str, Any]] = []  # as it goes to the server
        self._used = 0  # tokens the conversation has, about; see the module's description
        self._ids: dict[str, str] = {}  # the parser's id of each call of the last turn -> the history's
        self._awaiting = False  # a turn was sampled that no observation followed yet

    def prompt(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        stop: Sequence[str] = (),
        *,
        raw: str | None = None,
        authored: int | None = None,
        opening: Opening = PLAIN_OPENING,
    ) -> None:
        if raw is not None:
            raise ConfigError(
                "--no-apply-chat-template: a chat server applies its own template to every prompt; "
                "evaluate with --hf-checkpoint"
            )
        _refuse_inline(messages)
        self.messages, self._tools, self._stop = list(messages), tools, tuple(stop)
        self._history = [_outgoing(message) for message in messages]
        self._variables = {**self._variables, **(opening.variables or {})}

    async def generate(self) -> Turn:
        room = self._limits.max_context_len - self._used
        if room < 1:
            raise EpisodeEnd(StopReason.MAX_CONTEXT)
        budget = min(self._limits.max_response_len, self._params.max_new_tokens, room)
        params = for_turn(self._params, max_new_tokens=budget, stop=self._stop)
        seed = zlib.crc32(f"{self._seed}/{self._routing_key}/{self.num_turns}".encode()) >> 1
        started = time.monotonic()
        try:
            reply = await self._client.complete(
                self._history,
                params,
                tools=self._tools,
                template_kwargs=self._variables,
                seed=seed if params.temperature > 0 else None,
                timeout=self._limits.request_timeout_s,
            )
        except ContextOverflow as error:
            if self.turns:
                raise EpisodeEnd(StopReason.MAX_CONTEXT) from error
            raise self._prompt_too_long(str(error)) from error
        except EngineError as error:
            raise EpisodeEnd(StopReason.ENGINE_ERROR, str(error)) from error
        finally:
            seconds = time.monotonic() - started
            self.engine_seconds += seconds
        return self._take(reply, params.stop, budget, room, seconds)

    def _take(self, reply: Reply, stop: tuple[str, ...], budget: int, room: int, seconds: float) -> Turn:
        """Enter an answer into the history and the record."""
        content = clean_text(reply.content) if reply.tool_calls else _ended(clean_text(reply.content), reply, stop)
        text = Action(_turn_text(content, reply), self._parser)
        parsed = text.parsed
        self._remember(content, parsed, reply)
        cut_short = None
        if reply.finish_reason == "length":
            cut_short = StopReason.MAX_CONTEXT if budget == room else StopReason.MAX_TOKENS
        turn = Turn(text, self.messages[-1], reply.finish_reason, _NO_TOKENS, cut_short)
        self.last_turn, self._awaiting = turn, True
        prompt_tokens, sampled = reply.prompt_tokens, reply.output_tokens
        if prompt_tokens is None:
            prompt_tokens = self._used or _tokens_about(json.dumps([self._history[:-1], self._tools]))
        if sampled is None:
            sampled = _tokens_about(text)
        self._used = prompt_tokens + sampled
        self.turns.append(
            {
                "prompt_tokens": prompt_tokens,
                "sampled_tokens": sampled,
                "cached_tokens": reply.cached_tokens,
                "finish_reason": reply.finish_reason,
                "engine_seconds": seconds,
            }
        )
        if prompt_tokens >= self._limits.max_context_len and len(self.turns) == 1:
            raise self._prompt_too_long(f"it has {prompt_tokens} tokens")
        return turn

    def _remember(self, content: str, parsed: Parsed, reply: Reply) -> None:
        """The assistant's message: the server's own in the history, with calls as objects in the record."""
        message = Message(role="assistant", content=content)
        if reply.reasoning:
            message["reasoning_content"] = clean_text(reply.reasoning)
        if reply.tool_calls:
            calls = [
                ServerCall(call.id or f"call_{self.num_turns}_{index}", call.name, call.arguments)
                for index, call in enumerate(reply.tool_calls)
            ]
            self._ids = {own.id: call.id for own, call in zip(parsed.tool_calls, calls, strict=False)}
        else:
            if self._parser.structured:
                self._note_foreign(content)
                message = parsed.message()
            good = [call for call in parsed.tool_calls if call.error is None and parsed.structured]
            self._ids = {call.id: f"call_{self.num_turns}_{index}" for index, call in enumerate(good)}
            calls = [ServerCall(self._ids[call.id], call.name, json.dumps(call.arguments)) for call in good]
        sent: dict[str, Any] = {"role": "assistant", "content": message.get("content", ""), **reply.kept}
        if calls:
            sent["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
            message["tool_calls"] = [
                {**sent_call, "function": {"name": c.name, "arguments": _call_arguments(c.arguments)}}
                for sent_call, c in zip(sent["tool_calls"], calls, strict=True)
            ]
        self.messages.append(message)
        self._history.append(sent)

    def _note_foreign(self, content: str) -> None:
        if self._tools and any(mark in content for mark in _FOREIGN_CALLS):
            self._client.note(
                "the server returned a tool call as text in its model's own format, which is not executed: start it "
                "with its tool-call parser (SGLang: --tool-call-parser; vLLM: --enable-auto-tool-choice "
                "--tool-call-parser)"
            )

    def observe(self, messages: Sequence[Message]) -> None:
        if not self._awaiting:
            raise ConfigError("observe() before generate(): give the first messages to prompt()")
        _refuse_inline(messages)
        own = self._with_own_ids(messages)
        self.messages = [*self.messages, *own]
        size = sum(_tokens_about(message.get("content") or "") for message in messages)
        self._observed += size
        limit = self._limits.max_tool_output_tokens
        if limit is not None and self._observed > limit:
            raise EpisodeEnd(StopReason.MAX_TOOL_OUTPUT)
        self._used += size
        if self._used >= self._limits.max_context_len:
            raise EpisodeEnd(StopReason.MAX_CONTEXT)
        self._answer_calls(own)
        self._awaiting = False

    def _with_own_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Results under the ids of the history; those without an id answer the calls in order."""
        given = {message.get("tool_call_id") for message in messages}
        unclaimed = [own for parsed, own in self._ids.items() if parsed not in given]
        renamed = []
        for message in messages:
            if message["role"] == "tool":
                call_id = message.get("tool_call_id") or ""
                own = self._ids.get(call_id) or (unclaimed.pop(0) if not call_id and unclaimed else call_id)
                message = Message(**{**message, "tool_call_id": own})
            renamed.append(message)
        return renamed

    def _answer_calls(self, messages: Sequence[Message]) -> None:
        """Results first, each to its call; servers refuse a call without a result and a result without a call."""
        last = self._history[-1]
        open_ids = [call["id"] for call in last.get("tool_calls", ())]
        results, others = [], []
        for message in messages:
            sent = _outgoing(message)
            if sent["role"] != "tool":
                others.append(sent)
            elif sent["tool_call_id"] in open_ids:
                open_ids.remove(sent["tool_call_id"])
                results.append(sent)
            else:  # the result of a call that the server did not read as one
                others.append({"role": "user", "content": sent["content"]})
        if open_ids:  # the environment answers in words of its own: then the calls are words too
            del last["tool_calls"]
            assert self.last_turn is not None
            last["content"] = self.last_turn.text
            others = [{"role": "user", "content": m["content"]} for m in results] + others
            results = []
        self._history += [*results, *others]

    def _prompt_too_long(self, what: str) -> EpisodeEnd:
        return EpisodeEnd(
            StopReason.ENV_ERROR,
            f"task {self._name}: the first prompt does not fit: {what}. --rollout-max-context-len is "
            f"{self._limits.max_context_len}, --rollout-max-response-len {self._limits.max_response_len}; shorten the "
            "prompt, or set the limits to what the server's model takes",
            retryable=False,
        )


def _turn_text(content: str, reply: Reply) -> str:
    """A server's answer as the one text that environments step with.

    Reasoning comes first, between ``<think>`` tags, and calls last, in the hermes format. Nothing inside an argument
    can end a call or a reasoning block: its ``<`` is written as ``\\u003c``.
    """
    parts = [f"<think>\n{clean_text(reply.reasoning).strip()}\n</think>\n"] if reply.reasoning.strip() else []
    if reply.tool_calls:
        # What the server left in the content is no call in its eyes, and must not swallow the ones it read.
        content = content.replace(HermesParser.OPEN, "[tool_call]").replace(HermesParser.CLOSE, "[/tool_call]")
    if content:
        parts.append(content)
    parts += [f"{HermesParser.OPEN}\n{_call_json(call)}\n{HermesParser.CLOSE}" for call in reply.tool_calls]
    return "\n".join(parts)


def _tokens_about(text: str) -> int:
    """An estimate of the tokens of ``text``: four characters each."""
    return (len(text) + 3) // 4


def _call_json(call: ServerCall) -> str:
    arguments = _call_arguments(call.arguments)
    return json.dumps({"name": clean_text(call.name), "arguments": arguments}).replace("<", "\\u003c")


def _call_arguments(text: str) -> Any:
    """Arguments as an object; the text itself when it is none, for the environment's parser to explain."""
    text = clean_text(text)
    if not text.strip():
        return {}
    try:
        value, end = read_json(text)
    except Malformed:
        return text
    return value if isinstance(value, dict) and not text[end:].strip() else text


def _ended(content: str, reply: Reply, stop: tuple[str, ...]) -> str:
    """``content`` up to and with the stop string that ends it, whether or not the server knew or kept it."""
    ends = [at + len(word) for word in stop if (at := content.find(word)) >= 0]
    if ends:
        return content[: min(ends)]
    if reply.finish_reason == "length" or not stop:
        return content
    if reply.stopped_by is not None:
        return content + reply.stopped_by if reply.stopped_by in stop else content
    opened = [(at, word) for word in stop if word.startswith("</") and (at := content.rfind(f"<{word[2:]}")) >= 0]
    return content + max(opened)[1] if opened else content


def _outgoing(message: Message) -> dict[str, Any]:
    """A message of ours in the form of the API: arguments as text, no fields that it does not have."""
    sent: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    if message["role"] == "tool":
        sent["tool_call_id"] = message.get("tool_call_id", "")
    if message["role"] == "assistant" and message.get("tool_calls"):
        sent["tool_calls"] = [_outgoing_call(call, index) for index, call in enumerate(message["tool_calls"])]
    return sent


def _outgoing_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call.get("id") or f"call_{index}",
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }


def _refuse_inline(messages: Sequence[Message]) -> None:
    if any(message["role"] == INLINE for message in messages):
        raise ConfigError(
            f"messages of role {INLINE!r} continue the assistant's own turn, which a chat server cannot do. Evaluate "
            "this environment with --hf-checkpoint, or have it answer with messages of role 'user' or 'tool'"
        )
