"""HTTP/1.1 POST over kept-alive connections to one server: what the hot path needs and nothing else.

A general client costs several times the CPU of the exchange itself (aiohttp 0.45 ms where this takes 0.17, on two
quiet cores), at thousands of requests a second in one process. This one sends JSON to an engine or router of ours and
gives back status and body. It does not follow redirects, decompress or use proxies.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import urllib.parse

from agentrl.concurrency.clock import Clock
from agentrl.errors import ConfigError

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked")
_CLOSE = re.compile(rb"\r\nconnection:[^\r]*close")
_UNSAFE = re.compile(r"[^\x21-\x7e]")
_LARGEST_HEAD = 1 << 16
_STALE_SECONDS = 0.5


class HttpPost:
    """Posts to one URL. Bound to the event loop it is first used on.

    Args:
        url: ``http://host:port/path``.
        headers: sent with each request.
        connect_timeout: seconds to reach the server.
        idle_seconds: a connection unused for longer is not used again. uvicorn drops idle ones after 5 s.
    """

    def __init__(
        self, url: str, headers: dict[str, str], *, connect_timeout: float = 10.0, idle_seconds: float = 4.0
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"engine address {url!r} must be like http://host:port")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity", **headers}
        fixed = "".join(f"{name}: {_one_line(value)}\r\n" for name, value in lines.items())
        self._head = f"POST {parts.path or '/'} HTTP/1.1\r\n{fixed}".encode("latin-1")
        self._connect_timeout, self._idle_seconds = connect_timeout, idle_seconds
        self._idle: list[_Connection] = []  # most recently used last
        self._open: set[_Connection] = set()
        self._clock = Clock()

    async def post(self, body: bytes, header: str, value: str, *, timeout: float) -> tuple[int, bytes]:
        """Send ``body`` with one more header; ``(status, body of the answer)``.

        Given up or cancelled, it drops the connection, and the server sees that.

        Raises TimeoutError: no answer within ``timeout`` seconds.
        Raises OSError: no connection, or it broke before the answer was complete."""
        deadline = time.monotonic() + timeout
        extra = f"{header}: {_UNSAFE.sub('_', value)}\r\nContent-Length: {len(body)}\r\n\r\n"
        request = self._head + extra.encode() + body
        while True:
            connection, used = self._take(), True
            if connection is None:
                connection, used = await self._connect(min(self._connect_timeout, timeout)), False
            sent = time.monotonic()
            try:
                status, content = await self._clock.within(deadline - sent, connection.exchange(request))
            except _Stale:
                # Lost at once, it had been let go of before it was used. Lost later, the server had the request.
                if used and time.monotonic() - sent < _STALE_SECONDS:
                    continue
                raise
            if connection.usable:
                self._idle.append(connection)
            return status, content

    async def close(self) -> None:
        """Drop all connections; requests in flight fail."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        self._clock.close()
        await asyncio.sleep(0)

    def _take(self) -> _Connection | None:
        oldest = time.monotonic() - self._idle_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.used_at >= oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, seconds: float) -> _Connection:
        loop = asyncio.get_running_loop()
        tls = ssl.create_default_context() if self._tls else None
        try:
            async with asyncio.timeout(seconds) as clock:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), self._host, self._port, ssl=tls
                )
        except TimeoutError:
            if clock.expired():
                text = f"no connection to {self._host}:{self._port} in {seconds:g} s"
                raise ConnectionError(text) from None
            raise
        return connection


class _Stale(ConnectionError):
    """The connection ended before a byte of the answer came."""


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, open_connections: set[_Connection]) -> None:
        self._open = open_connections
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._lost: Exception | None = None
        self._reset()
        self.used_at = 0.0

    def _reset(self) -> None:
        self._data = bytearray()
        self._status = self._start = 0  # status 0: the head is not complete yet
        self._end = -1  # -1: not known from a Content-Length
        self._chunked = self._last = False

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return not self._last and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and wait for its answer."""
        if self._transport is None or self._transport.is_closing():
            raise _Stale("connection closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        except BaseException:
            self.abort()
            raise
        finally:
            self._answer = None

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self._answer is None or self._answer.done():
            return
        if not self._status and not self._data:
            self._answer.set_exception(_Stale(f"connection closed: {exc or 'by the server'}"))
        elif self._status and self._end < 0 and not self._chunked and exc is None:
            self._finish(bytes(self._data[self._start :]))  # a body that ends with the connection
        else:
            self._answer.set_exception(ConnectionError(f"connection lost inside an answer: {exc or 'by the server'}"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nobody asked
            return
        self._data += data
        try:
            while not self._status and self._read_head():
                pass
            if not self._status:
                return
            if self._end >= 0:
                if len(self._data) >= self._end:
                    self._finish(bytes(self._data[self._start : self._end]))
            elif self._chunked:
                body = _unchunk(self._data, self._start)
                if body is not None:
                    self._finish(body)
        except ValueError as error:
            self._answer.set_exception(ConnectionError(f"not an HTTP answer: {error}"))

    def _read_head(self) -> bool:
        """Read the head if it is there; True when it was an interim one (1xx) and another follows."""
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            if len(self._data) > _LARGEST_HEAD:
                raise ValueError("the head does not end")
            return False
        head = bytes(self._data[: end + 2]).lower()
        if not head.startswith(b"http/1."):
            raise ValueError(f"it begins with {head[:20]!r}")
        status = int(head[9:12])
        if status < 200:
            del self._data[: end + 4]
            return True
        self._status, self._start = status, end + 4
        self._last = head.startswith(b"http/1.0") or bool(_CLOSE.search(head))
        if _CHUNKED.search(head):
            self._chunked = True
        elif length := _LENGTH.search(head):
            self._end = self._start + int(length.group(1))
        elif status in (204, 304):
            self._end = self._start
        else:
            self._last = True
        return False

    def _finish(self, body: bytes) -> None:
        status, answer, last = self._status, self._answer, self._last
        self._reset()
        self._last = last
        self.used_at = time.monotonic()
        if last and self._transport is not None:
            self._transport.close()
        if answer is not None:
            answer.set_result((status, body))


def _unchunk(data: bytearray, at: int) -> bytes | None:
    """The body of a chunked answer; None while it is incomplete."""
    parts: list[bytes] = []
    while True:
        line = data.find(b"\r\n", at)
        if line < 0:
            return None
        size = int(data[at:line].split(b";")[0], 16)
        begin, at = line + 2, line + 4 + size
        if size == 0:  # trailers, if any, up to an empty line
            done = data.startswith(b"\r\n", begin) or data.find(b"\r\n\r\n", begin) >= 0
            return b"".join(parts) if done else None
        if len(data) < at:
            return None
        parts.append(bytes(data[begin : begin + size]))


def _one_line(value: str) -> str:
    if "\r" in value or "\n" in value:
        raise ConfigError("a header value must be one line")
    return value
