"""One episode's conversation with the policy: prompt, generate, observe, and the budgets on each.

The episode loop and custom generate functions both drive this object, so both write through the
same ledger and end for the same reasons.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from agentrl.config.template import checked_variables
from agentrl.errors import ConfigError, EngineError, EnvError
from agentrl.rollout.ledger import TokenLedger
from agentrl.rollout.policies.sglang import PolicyClient, new_rid
from agentrl.rollout.sampling import for_turn, turn_seed
from agentrl.rollout.template.chat import INLINE, ChatTemplate
from agentrl.rollout.template.extension import Earlier
from agentrl.tools.formats import Action, Parsed, Parser
from agentrl.types import Message, SamplingParams, Segment, StopReason, replace

AUTHOR_ROLES = ("system", "developer", "assistant")
"""Roles of a first prompt whose text is the author's own unless the task says otherwise: instructions and examples."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Budgets of one episode. Tokens are the model's own; seconds are wall time."""

    max_turns: int | None = None  # None: the environment's own
    max_response_len: int = 256  # sampled tokens in one turn (--rollout-max-response-len)
    max_context_len: int = 4096  # prompt, observations and answers together (--rollout-max-context-len)
    max_tool_output_tokens: int | None = None  # environment tokens after the first prompt, over the episode
    timeout_s: float = 600.0  # the episode (--episode-timeout)
    step_timeout_s: float = 300.0  # one reset or step of the environment (--episode-step-timeout)
    request_timeout_s: float = 600.0  # one turn of the engine, retries included (--engine-timeout)

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_response_len", "max_context_len", "max_tool_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("timeout_s", "step_timeout_s", "request_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a finite number of seconds above 0")


@dataclass(frozen=True)
class Opening:
    """How a conversation opens; ``messages`` stand before what is said to the agent first."""

    messages: Sequence[Message] = ()
    tools: list[dict[str, Any]] | None = None
    stop: Sequence[str] = ()
    trusted_roles: Sequence[str] = AUTHOR_ROLES  # of the author's messages, those that may hold control tokens
    variables: Mapping[str, Any] | None = None  # of the chat template, for this task, over the run's own

    @classmethod
    def of(cls, info: Mapping[str, Any], messages: Sequence[Message] = ()) -> Opening:
        """What a reset's ``info``, or an agent's part of it, says.
        Raises EnvError: ``trusted_roles`` or ``template_kwargs`` are not of the form that is expected."""
        roles, variables = info.get("trusted_roles", AUTHOR_ROLES), info.get("template_kwargs")
        if isinstance(roles, str) or not all(isinstance(role, str) for role in roles):
            raise EnvError(f"info['trusted_roles'] is {roles!r:.80}; a list of roles is expected, as in ['system']")
        if variables is not None:
            try:
                checked_variables(variables, "info['template_kwargs']")
            except ConfigError as error:
                raise EnvError(str(error)) from None
        return cls(messages, info.get("tools") or None, info.get("stop") or (), roles, variables)


PLAIN_OPENING = Opening()


class EpisodeEnd(Exception):
    """The episode cannot go on. Raised by :class:`Conversation`, caught by whoever runs it."""

    def __init__(self, reason: StopReason, error: str | None = None, *, retryable: bool = True) -> None:
        super().__init__(error or str(reason))
        self.reason = reason
        self.error = error
        self.retryable = retryable


@dataclass(slots=True)
class Turn:
    """What one call of the policy gave."""

    text: Action  # without the end-of-turn token
    message: Message
    finish_reason: str
    tokens: np.ndarray  # int32 [n]
    cut_short: StopReason | None = None  # the budget that ended it before the model did

    @property
    def parsed(self) -> Parsed:
        """The text, taken apart."""
        return self.text.parsed


class Dialogue(ABC):
    """The policy's side of one episode: one agent's.

    Args:
        parser: takes the model's text apart.
        params: of sampling.
        limits: budgets of the episode.
        name: what errors call the task.
        routing_key: keeps the turns of this episode on one engine.

    Attributes:
        messages: the record of what was said.
        turns: per turn: token counts, seconds, finish reason.
    """

    def __init__(
        self, *, parser: Parser, params: SamplingParams, limits: EpisodeLimits, routing_key: str, name: str
    ) -> None:
        self.messages: list[Message] = []
        self.turns: list[dict[str, Any]] = []
        self.engine_seconds = self.encode_seconds = 0.0
        self.last_turn: Turn | None = None
        self._parser, self._params, self._limits = parser, params, limits
        self._routing_key, self._name = routing_key, name
        self._tools: list[dict[str, Any]] | None = None
        self._stop: tuple[str, ...] = ()
        self._observed = 0  # tokens of observations so far

    @property
    def num_turns(self) -> int:
        """Turns sampled so far."""
        return len(self.turns)

    def segments(self) -> list[Segment]:
        """The tokens so far, see :meth:`TokenLedger.segments`; none where they stay with a server."""
        return []

    @abstractmethod
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
        """Open the conversation.

        Args:
            raw: text to send in place of the rendered ``messages``, which then are for the record only.
            authored: so many of the messages are those of the task's author, None: all; what others said follows.
            opening: which roles are trusted, and variables of the chat template.

        Raises:
            EpisodeEnd: ENV_ERROR when the prompt leaves no room for an answer.
            EnvError: the template refuses the messages, or ``raw`` is empty.
            ConfigError: a server cannot take such a prompt.
        """

    @abstractmethod
    async def generate(self) -> Turn:
        """Sample one turn. Raises EpisodeEnd: ENGINE_ERROR, or the context is full."""

    @abstractmethod
    def observe(self, messages: Sequence[Message]) -> None:
        """Append an observation (mask 0) and open the next turn.
        Raises EpisodeEnd: it does not fit into the context or the tool-output budget. What was sampled stays.
        Raises EnvError: the template refuses the messages, or they need one after a prompt without it."""


Client = TypeVar("Client", contravariant=True)


class Chat(Protocol[Client]):
    """What conversations with a kind of client are opened by: a chat template, or the server that has its own."""

    @property
    def call_format(self) -> str: ...

    def conversation(self, *, client: Client, parser: Parser, **parts: Any) -> Dialogue: ...


class Conversation(Dialogue):
    """A conversation of tokens with an engine, written through the ledger. ``parts`` are those of :class:`Dialogue`."""

    def __init__(self, *, client: PolicyClient, chat: ChatTemplate, **parts: Any) -> None:
        super().__init__(**parts)
        self._client, self._chat = client, chat
        self._ledger = TokenLedger()
        self._turn_params: SamplingParams | None = None  # those of the last turn
        self._last: Turn | None = None  # the turn that the next observation follows
        self._earlier: dict[Any, Earlier] = {}  # of each kind the latest turn, in the order of the conversation
        self._trusted: set[int] = set()  # messages whose text is the author's
        self._sampled: dict[int, np.ndarray] = {}  # ids of the messages that the model wrote
        self._said = ""  # what the last turn sampled, as text
        self._raw = False  # whether the prompt was sent without the template
        self._system = False  # whether it begins with a system message

    def segments(self) -> list[Segment]:
        return self._ledger.segments()

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
        started = time.monotonic()
        self.messages, self._tools, self._stop = list(messages), tools, tuple(stop)
        if tools:
            self._parser = self._parser.with_tools(tools)
        self._chat = self._chat.with_variables(opening.variables)
        self._trusted = {i for i, m in enumerate(messages[:authored]) if m["role"] in opening.trusted_roles}
        if raw is None:
            ids = self._chat.prompt(self.messages, tools, controls=self._controls(self.messages))
            self._system = bool(self.messages) and self.messages[0]["role"] == "system"
            turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            for start, end in itertools.pairwise([*turns, len(messages)]):
                self._note(messages[start], messages[start + 1 : end])
        else:
            ids = self._chat.raw_prompt(raw)
            self._raw = True
        self.encode_seconds += time.monotonic() - started
        if len(ids) >= self._limits.max_context_len:
            raise EpisodeEnd(
                StopReason.ENV_ERROR,
                f"task {self._name}: the first prompt has {len(ids)} tokens, --rollout-max-context-len is "
                f"{self._limits.max_context_len}; shorten the prompt or raise the limit",
                retryable=False,
            )
        self._ledger.start(ids)

    async def generate(self) -> Turn:
        prompt = self._ledger.ids
        room = self._limits.max_context_len - len(prompt)
        if room < 1:
            raise EpisodeEnd(StopReason.MAX_CONTEXT)
        budget = min(self._limits.max_response_len, self._params.max_new_tokens, room)
        if self._turn_params is None or self._turn_params.max_new_tokens != budget:
            eos = self._chat.eos_token_ids
            self._turn_params = for_turn(self._params, max_new_tokens=budget, stop=self._stop, stop_token_ids=eos)
        params = self._turn_params
        if params.seed is not None:
            params = replace(params, seed=turn_seed(params.seed, self._routing_key, self.num_turns))
        started = time.monotonic()
        try:
            generation = await self._client.generate(
                prompt,
                params,
                rid=new_rid(),
                routing_key=self._routing_key,
                timeout=self._limits.request_timeout_s,
            )
        except EngineError as error:
            raise EpisodeEnd(StopReason.ENGINE_ERROR, str(error)) from error
        finally:
            seconds = time.monotonic() - started
            self.engine_seconds += seconds
        self._ledger.append_sampled(generation)
        # Not every prompt of a template ends alike: DeepSeek-R1's opens the reasoning, but not after a tool.
        opening = self._chat.opening_of(prompt)
        text = Action(self._chat.text(generation.tokens, opening), self._parser)
        message = self._chat.history_message(text, text.parsed, self._parser.name)
        self._sampled[len(self.messages)] = generation.tokens
        self.messages.append(message)
        cut_short = None
        if generation.finish_reason == "length":
            cut_short = StopReason.MAX_CONTEXT if budget == room else StopReason.MAX_TOKENS
        self._said = text[len(opening) :]
        turn = Turn(text, message, generation.finish_reason, generation.tokens, cut_short)
        self._last = self.last_turn = turn
        self.turns.append(
            {
                "prompt_tokens": len(prompt),
                "sampled_tokens": len(generation.tokens),
                "cached_tokens": generation.cached_tokens,
                "finish_reason": generation.finish_reason,
                "engine_seconds": seconds,
            }
        )
        return turn

    def observe(self, messages: Sequence[Message]) -> None:
        started = time.monotonic()
        last = self._last
        if last is None:
            raise ConfigError("observe() before generate(): give the first messages to prompt()")
        if self._raw and any(m["role"] != INLINE for m in messages):
            roles = ", ".join(m["role"] for m in messages)
            raise EnvError(
                f"messages with roles [{roles}] need the chat template, and the prompt was sent without it; "
                f"go on with messages of role {INLINE!r}, whose text is appended as it is"
            )
        ids = self._chat.extension(
            last.message, last.tokens, messages, self._tools,
            said=self._said, earlier=tuple(self._earlier.values()), system=self._system,
        )  # fmt: skip
        segment = ids is None
        if ids is None:
            whole = [*self.messages, *messages]
            ids = self._chat.prompt(whole, self._tools, controls=self._controls(whole))
        self.encode_seconds += time.monotonic() - started
        self.messages.extend(messages)
        self._check_room(ids, messages, segment)
        if segment:
            self._ledger.new_segment(ids)
        else:
            self._ledger.append_env(ids)
        self._note(last.message, messages)
        self._last = None

    def _controls(self, messages: Sequence[Message]) -> list[frozenset[str]]:
        """The control tokens that each message may hold: the author's all, the model's those it sampled as such."""
        found = []
        for index in range(len(messages)):
            sampled = self._sampled.get(index)
            if sampled is not None:
                found.append(self._chat.encoder.sampled_controls(sampled))
            else:
                found.append(self._chat.every_control if index in self._trusted else frozenset())
        return found

    def _note(self, assistant: Message, answers: Sequence[Message]) -> None:
        """Remember the kind of a turn that is over: what a template drops or keeps later depends on it."""
        if not answers or (answers[0]["role"] == INLINE and all([m["role"] == INLINE for m in answers])):
            return  # the turn goes on
        turn = Earlier.of(assistant, answers)
        kind = (turn.reasoning, turn.roles[0])
        self._earlier.pop(kind, None)
        self._earlier[kind] = turn

    def _check_room(self, ids: np.ndarray, messages: Sequence[Message], segment: bool) -> None:
        limit = self._limits.max_tool_output_tokens
        if limit is not None:
            encode = self._chat.encoder.encode_content
            # A re-rendered history holds old observations too: count the new ones alone.
            self._observed += sum(len(encode(m.get("content") or "")) for m in messages) if segment else len(ids)
            if self._observed > limit:
                raise EpisodeEnd(StopReason.MAX_TOOL_OUTPUT)
        length = len(ids) if segment else len(self._ledger) + len(ids)
        if length >= self._limits.max_context_len:
            raise EpisodeEnd(StopReason.MAX_CONTEXT)
