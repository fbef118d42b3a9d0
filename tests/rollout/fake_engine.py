"""An aiohttp server that answers ``/generate`` as SGLang 0.5.23 does, and misbehaves on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], Any]


def answer(body: dict[str, Any], tokens: list[int], *, finish: str = "stop", version: str = "default", **meta: Any):
    """The JSON of one answer to ``body``."""
    return {
        "text": "",
        "output_ids": tokens,
        "meta_info": {
            "id": body["rid"],
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": version,
            "output_token_logprobs": [[-0.5, t, None] for t in tokens],
            **meta,
        },
    }


class FakeEngine:
    """Serves ``script``: one entry a request, the last one for ever.

    An entry is an HTTP status, ``"hang"``, ``"drop"`` (closes the connection), ``"torn"`` (half a JSON),
    ``"known"`` (SGLang's refusal of a request id that it has), or a function from the request's body to the
    answer's JSON.
    """

    def __init__(self, *script: Any, key: str | None = None) -> None:
        self.script = list(script)
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.in_flight = self.most_in_flight = 0
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)  # port 0 first, the same one when restarted
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        step = self.script[min(len(self.bodies), len(self.script) - 1)]
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            return await self._play(step, request, body)
        finally:
            self.in_flight -= 1

    async def _play(self, step: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if isinstance(step, int):
            return web.json_response({"error": {"message": f"status {step} on purpose"}}, status=step)
        if step == "known":
            message = f"Duplicate request ID detected: {body['rid']}"
            return web.json_response({"error": {"message": message}}, status=400)
        if step == "hang":
            await asyncio.sleep(60)
        if step == "drop":
            request.transport.close()
            return web.Response()
        if step == "torn":
            return web.Response(text='{"output_ids": [1, ', content_type="application/json")
        result = step(body)
        return web.json_response(await result if asyncio.iscoroutine(result) else result)
