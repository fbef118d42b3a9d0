"""What clients of ``agentrl serve`` reach, and what not."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from agentrl.errors import EngineError
from agentrl.serving.gateway import Gateway

CHAT = "/v1/chat/completions"


class Router:
    """Answers everything, so that only the gateway can refuse; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.keys: set[str | None] = set()
        self.cancelled = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        self.keys.add(request.headers.get("Authorization"))
        if request.path != CHAT:
            return web.json_response({"path": request.path}, content_type="text/plain")  # as sglang-router
        body = await request.json()
        if body.get("break"):
            request.transport.abort()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Inner": "1"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        if body.get("endless"):
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        await response.write(b"data: [DONE]\n\n")
        return response


def play(test, *, key: str = "client-key", **options) -> None:
    """Run ``test(session, url, router)`` against a gateway before a fake router."""

    async def main() -> None:
        router = Router()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", router.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        inner = f"http://127.0.0.1:{runner.addresses[0][1]}"
        gateway = Gateway(inner, "inner-key", key=key, host="127.0.0.1", port=0, **options)
        url = f"http://127.0.0.1:{await gateway.start()}"
        try:
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer client-key"}) as session:
                await test(session, url, router)
        finally:
            await gateway.stop()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/workers"), ("POST", "/workers"), ("DELETE", "/workers/1"), ("POST", "/add_worker"),
        ("GET", "/get_server_info"), ("POST", "/flush_cache"), ("GET", "/engine_metrics"), ("POST", "/generate"),
        ("GET", CHAT), ("POST", "/v1/models"), ("POST", "/v1/tokenize"), ("POST", "/v1/chat/completions/../../workers"),
        ("POST", "//workers"), ("GET", "/health_generate"),
    ],
)  # fmt: skip
def test_the_administration_is_not_there_even_with_the_key(method, path):
    async def test(session, url, router) -> None:
        import yarl

        async with session.request(method, yarl.URL(url + path, encoded=True), json={"url": "http://mine"}) as answer:
            assert answer.status in (404, 405)
        assert router.asked == []

    play(test)


def test_the_key_of_clients_is_not_the_routers():
    async def test(session, url, router) -> None:
        for given in ("", "Bearer", "Bearer wrong", "Bearer inner-key", "Basic client-key", "Bearer \xe9"):
            async with session.post(url + CHAT, json={}, headers={"Authorization": given}) as answer:
                assert answer.status == 401 and "error" in await answer.json()
        assert router.asked == []
        async with session.get(url + "/v1/models") as answer:
            assert await answer.json() == {"path": "/v1/models"}
        assert router.keys == {"Bearer inner-key"}

    play(test)


def test_answers_come_piece_by_piece_and_health_asks_for_no_key():
    async def test(session, url, router) -> None:
        async with session.post(url + CHAT, json={"endless": True}) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            assert await answer.content.readline() == b"data: one\n"  # while the router still writes
            assert "X-Inner" not in answer.headers
        await router.cancelled.wait()  # leaving ends the request behind the gateway
        async with session.post(url + CHAT, json={}) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        async with session.get(url + "/health", headers={"Authorization": ""}) as answer:
            assert answer.status == 200 and await answer.read() == b""

    play(test)


def test_bodies_are_bounded_and_json():
    async def test(session, url, router) -> None:
        async with session.post(url + CHAT, json={"x": "y" * 2000}) as answer:
            assert answer.status == 413
        async with session.post(url + CHAT, data="{}", headers={"Content-Type": "text/plain"}) as answer:
            assert answer.status == 415
        assert router.asked == []

    play(test, max_body=1000)


def test_without_a_key_everybody_on_loopback_may_ask():
    async def test(session, url, router) -> None:
        async with session.get(url + "/v1/models", headers={"Authorization": ""}) as answer:
            assert answer.status == 200

    play(test, key="")


def test_a_router_that_breaks_off_is_a_503():
    async def test(session, url, router) -> None:
        async with session.post(url + CHAT, json={"break": True}) as answer:
            assert answer.status == 503

    play(test)


def test_a_port_in_use_is_said():
    async def main() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        gateway = Gateway("http://127.0.0.1:1", "k", key="k", host="127.0.0.1", port=port)
        async with server:
            with pytest.raises(EngineError, match=f"cannot listen at 127.0.0.1:{port}"):
                await gateway.start()

    asyncio.run(main())
