"""Requests to a chat model behind any OpenAI-compatible server: retries, and what some servers do not take.

``POST {base_url}/chat/completions``, not streamed. What is tried again until the deadline: no connection, HTTP 408,
425, 429 and 5xx, an answer that is no JSON. ``Retry-After`` is honoured. What no retry mends (a wrong key, an unknown
model, a used-up quota) is a :class:`~agentrl.errors.ConfigError`, which ends the whole evaluation at once.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from agentrl.chat_api.refusals import ContextOverflow, error_text, refusal
from agentrl.chat_api.reply import Reply, parse_reply
from agentrl.errors import ConfigError, EngineError
from agentrl.types import SamplingParams

log = logging.getLogger(__name__)

_LARGEST_ANSWER = 64 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_GARBAGE_ATTEMPTS = 3
_REFUSALS = 3
"""Requests refused (HTTP 400) before any was answered after which the evaluation ends: it is not the tasks."""


class NoAnswer(Exception):
    """An attempt gave no valid answer; another may.

    ``after``: seconds the server asked to wait. ``reached``: whether there was a server at all.
    """

    def __init__(self, reason: str, after: float = 0.0, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.after, self.reached = after, reached


@dataclass
class ServerCounters:
    """Totals since the client was made. ``seconds`` sums over concurrent requests."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


class OpenAIClient:
    """Chat completions of one model. Use as an async context manager, or call :meth:`close`.

    Args:
        base_url: the API's root, such as ``https://host/v1``.
        model: the model's name there; empty until :meth:`choose_model` finds it.
        api_key: sent as a bearer token; None for servers without one. Never in a message or a log.
        api_key_env: name of the environment variable it came from, for messages.
        max_concurrency: requests in flight at most.
        backoff: seconds before the first retry; doubles up to ``max_backoff``, with jitter.

    Attributes:
        notes: what the server does not take and was left out, for the record and for the reader of the score.

    Raises:
        ConfigError: the address or the key cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        model: str = "",
        *,
        api_key: str | None = None,
        api_key_env: str = "",
        max_concurrency: int | None = None,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        connect_timeout: float = 10.0,
    ) -> None:
        self.base_url, self._host = _usable_url(base_url)
        self._key = _usable_key(api_key, api_key_env)
        self._connect_timeout = connect_timeout
        self._http: httpx.AsyncClient | None = None  # bound to the event loop that it is first used on
        self.model = model
        self.notes: list[str] = []
        self.counters = ServerCounters()
        self._key_env = api_key_env
        self._backoff, self._max_backoff = backoff, max_backoff
        self._max_concurrency = max_concurrency
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._left_out: set[str] = set()
        self._length_field = "max_tokens"
        self._refusals = 0
        self._reached = 0.0  # when the server was last there, on the monotonic clock
        self._broken: str | None = None
        self.trouble: str | None = None
        """Why the last attempt got no answer; None after one that did."""
        if self._key and self.base_url.startswith("http://") and self._host not in _LOOPBACK:
            self.note(f"the key of {api_key_env or 'the client'} goes to {self.base_url} unencrypted")

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The client can be used again afterwards."""
        client, self._http = self._http, None
        if client is not None:
            await client.aclose()

    def metrics(self) -> dict[str, float]:
        """The counters as one flat dict."""
        return asdict(self.counters)

    def broken(self) -> str | None:
        """Why no answer can be expected any more: all through the time of a request no server was there."""
        return self._broken

    def note(self, text: str) -> None:
        """Remember ``text`` once, and log it."""
        if text not in self.notes:
            self.notes.append(text)
            log.warning("%s", text)

    async def choose_model(self, wanted: str | None, *, timeout: float = 10.0) -> str:
        """Settle which model is asked: ``wanted``, or the only one that the server lists.

        Also the first contact: a wrong address or key shows here. A server without a list of models is fine.

        Raises ConfigError: wrong key; no name given and not exactly one model listed.
        Raises EngineError: no server answers within ``timeout`` seconds."""
        listed = await self._listed_models(timeout)
        if wanted:
            if listed and wanted not in listed:
                shown = ", ".join(sorted(listed)[:8]) + (", ..." if len(listed) > 8 else "")
                self.note(f"the server does not list a model {wanted!r}; it lists {shown}")
            self.model = wanted
        elif listed is not None and len(listed) == 1:
            self.model = listed[0]
        else:
            known = f"it lists {', '.join(sorted(listed)[:20])}" if listed else "it does not say which it has"
            raise ConfigError(f"--model is needed to choose a model of {self.base_url}: {known}")
        return self.model

    async def complete(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        seed: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        timeout: float,
    ) -> Reply:
        """The model's answer to ``messages``, within ``timeout`` seconds.

        ``template_kwargs`` are variables of the server's chat template; they are never left out, since another prompt
        would be another task.

        Raises ConfigError: the server will refuse every request: wrong key, unknown model, no tools, no money.
        Raises ContextOverflow: the conversation is longer than the model takes.
        Raises EngineError: no valid answer in time, or this one request was refused."""
        started = time.monotonic()
        try:
            async with self._slot(timeout):
                reply = await self._attempts(
                    lambda: self._body(messages, params, tools, seed, template_kwargs), started + timeout, timeout
                )
        except EngineError:
            self.counters.failures += 1
            raise
        counters = self.counters
        counters.requests += 1
        counters.prompt_tokens += reply.prompt_tokens or 0
        counters.cached_tokens += reply.cached_tokens
        counters.output_tokens += reply.output_tokens or 0
        counters.seconds += time.monotonic() - started
        return reply

    async def _attempts(self, body_now: Callable[[], dict[str, Any]], deadline: float, timeout: float) -> Reply:
        delay, reason, garbage = self._backoff, "", 0
        while (left := deadline - time.monotonic()) > 0:
            body = body_now()
            pause = delay * random.uniform(0.5, 1.0)
            try:
                status, content, wait = await self._exchange("POST", "/chat/completions", body, left)
                self._reached, self._broken = time.monotonic(), None
                if status == 200:
                    reply = parse_reply(content)
                    self.trouble = None
                    return reply
                self._judge(status, content, wait, body)
                continue  # the request is sent again without what the server does not take
            except NoAnswer as error:
                self._reached = time.monotonic() if error.reached else self._reached
                if not reason or time.monotonic() < deadline:  # that time was up says less than what came before
                    reason = self._safe(str(error))
                pause = max(pause, error.after)
            except ValueError as error:
                garbage += 1
                reason = self._safe(str(error))
                if garbage == _GARBAGE_ATTEMPTS:
                    raise EngineError(f"{self.base_url}/chat/completions: {reason}") from None
            self.trouble = reason
            self.counters.retries += 1
            if time.monotonic() + pause >= deadline:
                if self._reached < deadline - timeout:
                    self._broken = f"no server answers at {self.base_url} since {timeout:g} s: {reason}"
                break
            await asyncio.sleep(pause)
            delay = min(2 * delay, self._max_backoff)
        raise EngineError(
            f"{self.base_url} gave no answer within {timeout:g} s; last: {reason or 'no time left to ask'}. "
            "A longer deadline is --engine-timeout"
        )

    def _body(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        tools: Sequence[dict[str, Any]] | None,
        seed: int | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        if "reasoning" in self._left_out:
            messages = [{k: v for k, v in m.items() if not k.startswith("reasoning")} for m in messages]
        optional = {
            "temperature": params.temperature,
            "top_p": params.top_p if params.top_p != 1.0 else None,
            "top_k": params.top_k if params.top_k != -1 else None,
            "stop": list(params.stop) or None,
            "seed": seed,
        }
        body = {"model": self.model, "messages": list(messages), "stream": False}
        body |= {self._length_field: params.max_new_tokens}
        body |= {name: value for name, value in optional.items() if value is not None and name not in self._left_out}
        body |= {"tools": list(tools)} if tools else {}
        return body | ({"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else {})

    def _judge(self, status: int, content: bytes, wait: float, body: dict[str, Any]) -> None:
        """What an answer other than 200 means; returns when the request may be sent again in another form.

        Raises: what :meth:`complete` raises, or NoAnswer.
        """
        text = self._safe(error_text(content))
        verdict = refusal(status, content, body)
        if verdict.kind == "transient":
            raise NoAnswer(f"HTTP {status}: {text[:300]}", wait)
        if verdict.kind == "overflow":
            raise ContextOverflow(f"the server refused the request with HTTP {status}: {text}")
        if verdict.kind == "rename":
            self._length_field = verdict.field
            return
        if verdict.kind == "drop":
            self._left_out.add(verdict.field)
            self.note(f"the server takes no {verdict.field!r} for {self.model}: left out ({text[:200]})")
            return
        where = f"{self.base_url}/chat/completions"
        if verdict.kind == "fatal":
            raise ConfigError(f"{where} answered HTTP {status}: {text}. {self._advice(status, verdict.field)}")
        self._refusals += 1
        if self._refusals >= _REFUSALS and not self.counters.requests:
            raise ConfigError(f"{where} refuses every request, with HTTP {status}: {text}")
        raise EngineError(f"{where} refused the request with HTTP {status}: {text}")

    def _advice(self, status: int, about: str) -> str:
        """What to do about an answer that ends the evaluation."""
        if about == "tools":
            return (
                "The environment's tools cannot be offered. Start the server with a tool-call parser (SGLang: "
                "--tool-call-parser; vLLM: --enable-auto-tool-choice --tool-call-parser), or give the environment a "
                "tag format"
            )
        if about == "quota":
            return "No retry will help: see the account's quota"
        if status in (401, 403):
            state = f"the environment variable {self._key_env}" if self._key_env else "nowhere"
            return f"The key is taken from {state}, which is {'set' if self._key else 'not set'}"
        return f"Check --base-url (it usually ends with /v1) and --model (now {self.model!r})"

    async def _listed_models(self, timeout: float) -> list[str] | None:
        deadline, pause = time.monotonic() + timeout, self._backoff
        while True:
            try:
                status, content, _ = await self._exchange("GET", "/models", None, deadline - time.monotonic())
                break
            except NoAnswer as error:
                if time.monotonic() + pause >= deadline:
                    text = f"no server answers at {self.base_url}: {self._safe(str(error))}"
                    raise EngineError(text + ". Is it running, and is --base-url right?") from None
                await asyncio.sleep(pause)
        if status == 401:
            said = self._safe(error_text(content))
            raise ConfigError(f"{self.base_url} answered HTTP 401: {said}. {self._advice(401, '')}")
        try:
            return [str(entry["id"]) for entry in json.loads(content)["data"]] if status == 200 else None
        except (ValueError, TypeError, KeyError, RecursionError):
            return None  # not every server has this list, and nothing but a default depends on it

    def _safe(self, text: str) -> str:
        """``text`` without the key, which servers like to repeat."""
        return text.replace(self._key.get_secret_value(), "***") if self._key else text

    async def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float
    ) -> tuple[int, bytes, float]:
        """``(status, body, seconds the server asked to wait)`` of one request.

        Raises NoAnswer without a whole answer in time.
        """
        content = None
        if body is not None:
            # Not every server reads the escape of a lone surrogate, which a model can produce.
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        answer = bytearray()
        try:
            async with (
                asyncio.timeout(max(seconds, 0.001)) as clock,
                self._client().stream(method, self.base_url + path, content=content) as response,
            ):
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > _LARGEST_ANSWER:
                        raise EngineError(f"{self.base_url}{path}: the answer is longer than {_LARGEST_ANSWER} bytes")
                return response.status_code, bytes(answer), _seconds_to_wait(response.headers.get("retry-after"))
        except TimeoutError:
            if not clock.expired():
                raise
            raise NoAnswer(f"no whole answer in {seconds:.1f} s") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise NoAnswer(f"{type(error).__name__}: {error}", reached=reached) from None

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key.get_secret_value()}"
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=self._connect_timeout),
                # uvicorn drops idle connections after 5 s.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
                # A proxy of the environment is for servers elsewhere.
                trust_env=self._host not in _LOOPBACK,
            )
        return self._http

    @asynccontextmanager
    async def _slot(self, timeout: float) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        try:
            async with asyncio.timeout(timeout):
                await self._slots.acquire()
        except TimeoutError:
            raise EngineError(
                f"no free slot within {timeout:g} s: {self._max_concurrency} requests are in flight already"
            ) from None
        try:
            yield
        finally:
            self._slots.release()


def _usable_url(base_url: str) -> tuple[str, str]:
    """The URL without trailing slash, and its host."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--base-url {base_url!r}: expected an address like http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.hostname}..."
        raise ConfigError(f"--base-url {shown}: expected an address without user, password, query and fragment")
    url = base_url.rstrip("/").removesuffix("/chat/completions")
    return url, parts.hostname


def _usable_key(key: str | None, env: str) -> SecretStr | None:
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"the key in the environment variable {env} holds characters that no key has")
    return SecretStr(key) if key else None


def _seconds_to_wait(header: str | None) -> float:
    """A ``Retry-After`` header in seconds from now; 0 without one."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0
