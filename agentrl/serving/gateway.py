"""The only door of ``agentrl serve``: what clients may ask of the router, and nothing else.

sglang-router knows one key for requests and for its own administration: whoever has it can put in an engine of his own
and so read everybody's prompts. So the router stays on loopback with a key of its own, and clients meet this proxy: a
list of allowed paths, a key that opens these alone, and bodies of a bounded size. Answers are passed on as they come.
"""

from __future__ import annotations

import hmac

import aiohttp
from aiohttp import web

from agentrl.errors import EngineError

ALLOWED = (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"))
HEALTH = "/health"
MAX_BODY = 32 << 20
"""Bytes of a request: a million tokens as text, several times over."""
_CONNECT_S = 10.0
_PASSED_BACK = ("Content-Type", "Retry-After", "Cache-Control")


class Gateway:
    """Serves :data:`ALLOWED` for holders of ``key`` (empty: for everybody), and :data:`HEALTH` for all.

    Args:
        upstream: address of the router.
        upstream_key: the router's key; it never leaves this process but to the router.
        key: what clients send as a bearer token.
        host, port: where to listen; port 0 takes a free one.
    """

    def __init__(self, upstream: str, upstream_key: str, *, key: str, host: str, port: int, max_body: int = MAX_BODY):
        self._upstream = upstream
        self._upstream_key = upstream_key
        self._key = key.encode()
        self._host, self._port = host, port
        self._max_body = max_body
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen; returns the port. Raises EngineError: the port is in use, or the address is none of this machine."""
        app = web.Application(client_max_size=self._max_body)
        for method, path in ALLOWED:
            app.router.add_route(method, path, self._pass_on)
        app.router.add_route("GET", HEALTH, self._health)
        # A client that leaves ends its request at the engine too.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self.stop()
            raise EngineError(f"cannot listen at {self._host}:{self._port}: {error.strerror or error}") from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"Authorization": f"Bearer {self._upstream_key}"},
        )
        return self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections. Idempotent."""
        runner, self._runner = self._runner, None
        session, self._session = self._session, None
        if runner is not None:
            await runner.cleanup()
        if session is not None:
            await session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self._key and not hmac.compare_digest(_bearer(request), self._key):
            return _refusal(401, "the API key is missing or wrong")
        body = None
        if request.method == "POST":
            # A web page can send other types to an address on loopback without being asked for leave.
            if request.content_type != "application/json":
                return _refusal(415, "send application/json")
            body = await request.read()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        response: web.StreamResponse | None = None
        assert self._session is not None
        try:
            async with self._session.request(
                request.method, self._upstream + request.path, data=body, headers=headers
            ) as answer:
                kept = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=kept)
                if answer.status == 200 and request.method == "GET":
                    response.content_type = "application/json"  # the router says text, and clients then read none
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError):
            if response is not None:  # begun already: the client must see that it is cut off
                if request.transport is not None:
                    request.transport.abort()
                return response
            return _refusal(503, "no engine answers; try again")

    async def _health(self, request: web.Request) -> web.Response:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._upstream}/readiness") as answer:
                return web.Response(status=200 if answer.status == 200 else 503)
        except (aiohttp.ClientError, TimeoutError):
            return web.Response(status=503)


def _bearer(request: web.Request) -> bytes:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip().encode(errors="replace") if scheme.lower() == "bearer" else b""


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
