"""HTTP to one OpenAI-compatible server: one request, one whole answer, and the key in no message."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from agentrl.errors import ConfigError, EngineError

_LARGEST_ANSWER = 64 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class NoAnswer(Exception):
    """An attempt gave no valid answer; another may.

    ``after``: seconds the server asked to wait. ``reached``: whether there was a server at all.
    """

    def __init__(self, reason: str, after: float = 0.0, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.after, self.reached = after, reached


class ServerConnection:
    """Requests below one base URL. Bound to the event loop it is first used on.

    Args:
        base_url: the API's root, such as ``https://host/v1``.
        api_key: sent as a bearer token.
        api_key_env: name of the environment variable it came from, for messages.
        connect_timeout: seconds to reach the server.

    Raises:
        ConfigError: the address or the key cannot be used.
    """

    def __init__(self, base_url: str, api_key: str | None, api_key_env: str = "", *, connect_timeout: float = 10.0):
        self.base_url, self._host = _checked_url(base_url)
        self._key = _checked_key(api_key, api_key_env)
        self._connect_timeout = connect_timeout
        self._http: httpx.AsyncClient | None = None

    @property
    def has_key(self) -> bool:
        return self._key is not None

    @property
    def exposes_key(self) -> bool:
        """Whether the key goes over a network unencrypted."""
        return self.has_key and self.base_url.startswith("http://") and self._host not in _LOOPBACK

    def safe(self, text: str) -> str:
        """``text`` without the key, which servers like to repeat."""
        return text.replace(self._key, "***") if self._key else text

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        client, self._http = self._http, None
        if client is not None:
            await client.aclose()

    async def exchange(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float
    ) -> tuple[int, bytes, float]:
        """``(status, body, seconds the server asked to wait)`` of one request.

        Raises:
            NoAnswer: nothing, or no whole answer, within ``seconds``.
            EngineError: the answer is too long to be one.
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
                headers["Authorization"] = f"Bearer {self._key}"
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=self._connect_timeout),
                # uvicorn drops idle connections after 5 s.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
                # A proxy of the environment is for servers elsewhere.
                trust_env=self._host not in _LOOPBACK,
            )
        return self._http


def _checked_url(base_url: str) -> tuple[str, str]:
    """The URL without trailing slash, and its host."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--base-url {base_url!r}: expected an address like http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.hostname}..."
        raise ConfigError(f"--base-url {shown}: expected an address without user, password, query and fragment")
    url = base_url.rstrip("/").removesuffix("/chat/completions")
    return url, parts.hostname


def _checked_key(key: str | None, env: str) -> str | None:
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"the key in the environment variable {env} holds characters that no key has")
    return key or None


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
