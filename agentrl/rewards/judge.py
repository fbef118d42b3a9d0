"""A language model as a judge, asked over HTTP at any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.concurrency.threads import run_blocking
from agentrl.errors import ConfigError, EngineError, InfraError, did_you_mean
from agentrl.rewards.reply_cache import ReplyCache
from agentrl.rewards.shared import SharedReward
from agentrl.rewards.verdicts import PROMPT, SYSTEM_PROMPT, check_prompt, compile_format, fill, read_score
from agentrl.types import SamplingParams
from agentrl.values import check_number

if TYPE_CHECKING:
    from agentrl.chat_api.client import OpenAIClient

Message = dict[str, str]
DEFAULT_KEY_ENV = "OPENAI_API_KEY"


@dataclass
class _Connection:
    """What belongs to one event loop: the client, its free places, and what is being asked."""

    client: OpenAIClient
    places: asyncio.Semaphore
    asking: dict[str, asyncio.Task[Any]] = field(default_factory=dict)


class Judge(SharedReward):
    """A reward given by a language model: the score, from 0 to 1, that it writes about the final text.

    It sees the task and what the model wrote, nothing that a tool said. The same request is sent once. What goes
    wrong at the server is never a score: the episode is tried again or left out; a wrong key or an unknown model ends
    the run.

    Give an instance as a reward, or a subclass that sets attributes (``--custom-rm-path file.py:MyJudge``).

    Example:
        >>> class Politeness(Judge):
        ...     base_url = "http://127.0.0.1:30000/v1"
        ...     model = "judge"
        ...     prompt = "Is this polite? {response} End with 'Verdict: yes' or 'Verdict: no'."
        ...     parse = "verdict"
        >>> Politeness(timeout=20).timeout
        20

    Args:
        base_url: The API's root, such as ``https://host/v1``.
        model: The model's name there.
        **settings: Replace the attributes below, by name.

    Raises:
        ConfigError: A setting is unknown, missing or cannot be used.
    """

    base_url: str = ""
    model: str = ""
    prompt: str = PROMPT
    """The request. ``{question}``, ``{answer}``, ``{response}`` and ``{row.NAME}`` are filled in; ``{response}`` must
    be there. All other braces stay."""
    system_prompt: str = SYSTEM_PROMPT
    """First message of the request; empty for none."""
    parse: str | Callable[[str], Any] = "score"
    """Where the score is in the reply: ``score`` (``Score: 7``), ``number`` (the last one), ``verdict``
    (``Verdict: correct``), a regular expression with a group around it, or a function of the reply that returns a
    number or a dict of named parts; None, ValueError or LookupError where it finds none."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The number that is worth 0 and the one that is worth 1."""
    unparsable: float | None = None
    """What a reply without a score is worth after ``retries``. None: the episode is tried again or left out."""
    api_key_env: str | None = DEFAULT_KEY_ENV
    """Environment variable that holds the key. A name of your own must be set; None sends no key."""
    temperature: float = 0.0
    max_tokens: int = 1024
    """Most tokens of a reply."""
    max_chars: int = 32_000
    """Longest response in characters that is shown whole; of a longer one the middle is left out."""
    timeout: float = 60.0
    """Seconds one request may take. Within them, what a server refuses for the moment is sent again."""
    retries: int = 2
    """Further requests after one without an answer in time, or without a score in it."""
    max_concurrency: int = 16
    """Requests at once; more of them wait."""
    cache: bool | str | os.PathLike[str] = True
    """True: replies are kept in memory. A path: in that file too, for later runs and other processes. False: not."""
    name: str = ""
    """Under which name the reward is logged; empty: that of the class."""

    _settings: ClassVar[tuple[str, ...]] = tuple(__annotations__)
    _runtime = ("_connections", "_replies")

    def __init__(self, base_url: str | None = None, model: str | None = None, **settings: Any) -> None:
        for name, value in {"base_url": base_url, "model": model, **settings}.items():
            if name not in self._settings:
                hint = did_you_mean(name, self._settings) or f" It has {', '.join(self._settings)}."
                raise ConfigError(f"{type(self).__name__} has no setting {name!r}.{hint}")
            if value is not None or name not in ("base_url", "model"):
                setattr(self, name, value)
        self._check()

    def _open(self) -> None:
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}
        self._replies: ReplyCache | None = None

    def _check(self) -> None:
        title = type(self).__name__
        if not self.base_url or not self.model:
            raise ConfigError(
                f"{title} needs base_url, such as 'http://127.0.0.1:30000/v1', and model, the name of the model there; "
                f"got {self.base_url!r} and {self.model!r}."
            )
        check_prompt(self.prompt)
        if isinstance(self.parse, str):
            compile_format(self.parse)
        for name, least in (("timeout", 0.001), ("retries", 0), ("max_concurrency", 1), ("max_tokens", 1),
                            ("max_chars", 1), ("temperature", 0)):  # fmt: skip
            check_number(f"{title}: {name}", getattr(self, name), least, whole=False)
        if len(self.scale) != 2 or self.scale[0] == self.scale[1]:
            raise ConfigError(f"{title}: scale must be two different numbers, got {self.scale!r}.")

    def messages(self, text: str, answer: Any, row: dict[str, Any]) -> list[Message]:
        """The request about one episode, by its final text, the answer and the task; override it for a form of your
        own."""
        request = [Message(role="user", content=fill(self.prompt, text, answer, row, self.max_chars))]
        return [Message(role="system", content=self.system_prompt), *request] if self.system_prompt else request

    async def __call__(self, text: str, answer: Any = None, *, row: dict[str, Any] | None = None) -> Any:
        """The score of one episode.
        Raises InfraError: no answer, or none with a score in it.
        Raises ConfigError: the server will refuse every request (a wrong key, an unknown model)."""
        messages = self.messages(text, answer, row or {})
        key = self._key(messages)
        replies = await self._cache()
        if replies is not None:
            reply = await run_blocking(replies.get, key)
            score = None if reply is None else await self._read(reply)
            if score is not None:
                return score
        asking = self._connection().asking
        if key not in asking:
            task = asyncio.get_running_loop().create_task(self._ask(messages, key))
            asking[key] = task
            task.add_done_callback(lambda done: (asking.pop(key, None), done.cancelled() or done.exception()))
        try:
            return await asyncio.shield(asking[key])  # others may wait for the same answer
        except InfraError as error:
            raise InfraError(str(error)) from error

    async def aclose(self) -> None:
        """Closes the connections of this event loop. The judge can be used again."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.client.close()

    def _key(self, messages: list[Message]) -> str:
        """Of everything a reply depends on."""
        parts = [self.base_url, self.model, messages, self.temperature, self.max_tokens]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()

    async def _cache(self) -> ReplyCache | None:
        if self.cache is False:
            return None
        if self._replies is None:
            made = await run_blocking(ReplyCache, None if self.cache is True else self.cache)
            self._replies = self._replies or made  # several callers may have made one
        return self._replies

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            from agentrl.chat_api.client import OpenAIClient

            for old in [known for known in self._connections if known.is_closed()]:
                del self._connections[old]
            env = self.api_key_env or ""
            key = os.environ.get(env) if env else None
            if key is None and env not in ("", DEFAULT_KEY_ENV):
                raise ConfigError(f"{type(self).__name__}: the environment variable {env} is not set; it has the key.")
            try:
                client = OpenAIClient(self.base_url, self.model, api_key=key, api_key_env=env)
            except ConfigError as error:
                raise ConfigError(self._said(error)) from error
            self._connections[loop] = _Connection(client, asyncio.Semaphore(self.max_concurrency))
        return self._connections[loop]

    async def _ask(self, messages: list[Message], key: str) -> Any:
        """The score in the first reply that has one, which is then kept."""
        from agentrl.chat_api.refusals import ContextOverflow

        connection = self._connection()
        params = SamplingParams(temperature=self.temperature, max_new_tokens=self.max_tokens)
        trouble, answered = "", False
        for attempt in range(self.retries + 1):
            async with connection.places:
                try:
                    reply = await connection.client.complete(
                        messages, params, seed=attempt or None, timeout=self.timeout
                    )
                except ContextOverflow as error:
                    raise InfraError(f"{self._said(error)}. Lower max_chars (now {self.max_chars}).") from error
                except EngineError as error:
                    trouble, answered = self._said(error), False
                    continue
                except ConfigError as error:
                    raise ConfigError(self._said(error)) from error
            score = await self._read(reply.content)
            if score is not None:
                if self._replies is not None:
                    await run_blocking(self._replies.put, key, reply.content)
                return score
            cut = f", which was cut at max_tokens {self.max_tokens}" if reply.finish_reason == "length" else ""
            trouble = f"{type(self).__name__} {self.model}: no score in the reply {reply.content[-300:]!r}{cut}"
            answered = True
        if answered and self.unparsable is not None:
            return self.unparsable
        raise InfraError(trouble)

    async def _read(self, reply: str) -> Any:
        if callable(self.parse):
            try:
                return await run_blocking(self.parse, reply)
            except (ValueError, LookupError):  # such as JSON that is none, or lacks a key
                return None
        return read_score(reply, self.parse, self.scale)

    def _said(self, error: Exception) -> str:
        """An error of the client, which names flags, in terms of the judge's settings."""
        text = str(error).rstrip(".")
        for flag, setting in (("--engine-timeout", "timeout"), ("--base-url", "base_url"), ("--model", "model")):
            text = text.replace(flag, setting)
        return f"{type(self).__name__} {self.model}: {text}"
