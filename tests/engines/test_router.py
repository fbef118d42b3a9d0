"""The real router in front of fake engines: keys, stickiness, failover, where it listens."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sockets import listening

from agentrl.engines.router import POLICIES, RouterProcess
from agentrl.errors import EngineError
from agentrl.rollout.policies.sglang import ROUTING_HEADER
from tests.engines.fake_engine import KEY, FakeEngine

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}


@asynccontextmanager
async def routed(tmp_path: Path, n: int = 2, **options: Any) -> AsyncIterator[tuple[RouterProcess, list[FakeEngine]]]:
    engines = [await FakeEngine().start() for _ in range(n)]
    router = RouterProcess(log_dir=tmp_path, **options)
    try:
        await asyncio.to_thread(router.start, 60)
        for engine in engines:
            await asyncio.to_thread(router.add_worker, engine.url, KEY)
        yield router, engines
    finally:
        await asyncio.to_thread(router.stop)
        for engine in engines:
            await engine.stop()


async def post(session: aiohttp.ClientSession, router: RouterProcess, key: str, **body: Any) -> int:
    headers = {"Authorization": f"Bearer {router.api_key}", ROUTING_HEADER: key}
    async with session.post(router.url + "/generate", json=BODY | body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def post_until_served(session: aiohttp.ClientSession, router: RouterProcess, key: str) -> int:
    """As the rollout's client does: again, under a new key, after a failure. Returns the number of failures."""
    for failures in range(50):
        if await post(session, router, f"{key}~{failures}" if failures else key) == 200:
            return failures
        await asyncio.sleep(0.05)
    raise AssertionError("never served")


async def test_a_trajectory_stays_on_its_engine_and_trajectories_spread(tmp_path: Path) -> None:
    async with routed(tmp_path) as (router, engines), aiohttp.ClientSession() as session:
        keys = [uuid.uuid4().hex for _ in range(24)]
        for key in keys:
            for turn in range(3):
                assert await post(session, router, key, rid=f"{key}-{turn}") == 200
        by_engine = [{rid.rsplit("-", 1)[0] for rid in engine.generated} for engine in engines]
        assert sum(map(len, by_engine)) == len(keys)
        assert all(len(served) >= 2 for served in by_engine)


async def test_keys_are_asked_for_and_not_shown(tmp_path: Path) -> None:
    async with routed(tmp_path, n=1) as (router, engines), aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {KEY}"}):
            for path in ("/generate", "/workers"):
                async with session.post(router.url + path, json=BODY, headers=headers) as answer:
                    assert answer.status == 401, path
        assert engines[0].generated == []
        shown = Path(f"/proc/{router.pid}/cmdline").read_bytes() + router.log_path.read_bytes()
        assert router.api_key.encode() not in shown and KEY.encode() not in shown


async def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    async with routed(tmp_path, n=1) as (router, _):
        addresses = listening([router.pid])
        assert len(addresses) == 2  # requests and metrics
        assert {host for host, _ in addresses} == {"127.0.0.1"}


async def test_an_engine_that_dies_costs_a_request_only_retries(tmp_path: Path) -> None:
    async with routed(tmp_path) as (router, engines), aiohttp.ClientSession() as session:
        await engines[0].stop()
        async with asyncio.timeout(30):
            failures = await asyncio.gather(*(post_until_served(session, router, uuid.uuid4().hex) for _ in range(32)))
        assert max(failures) < 30
        assert len(engines[1].generated) == 32


async def test_a_restarted_engine_gets_traffic_soon(tmp_path: Path) -> None:
    async with routed(tmp_path) as (router, engines), aiohttp.ClientSession() as session:
        dead = engines[0]
        await dead.stop()
        await asyncio.gather(*(post_until_served(session, router, uuid.uuid4().hex) for _ in range(8)))
        await asyncio.to_thread(router.remove_worker, dead.url)
        assert [worker["url"] for worker in router.workers()] == [engines[1].url]
        engines[0] = await FakeEngine().start()
        await asyncio.to_thread(router.add_worker, engines[0].url, KEY)
        for _ in range(24):
            assert await post(session, router, uuid.uuid4().hex) == 200
        assert engines[0].generated


async def test_adding_and_removing(tmp_path: Path) -> None:
    async with routed(tmp_path, n=1) as (router, engines):
        await asyncio.to_thread(router.remove_worker, "http://127.0.0.1:1")  # unknown: no error
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(EngineError, match="did not admit"):
                await asyncio.to_thread(lambda: router.add_worker(url, KEY, timeout=1.0))


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_serves(tmp_path: Path, policy: str) -> None:
    async with routed(tmp_path, policy=policy) as (router, _), aiohttp.ClientSession() as session:
        for _ in range(4):
            assert await post(session, router, uuid.uuid4().hex) == 200


def test_wrong_policy_and_port_in_use(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="policy 'fastest' is not known; expected one of consistent_hashing"):
        RouterProcess(policy="fastest")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is in use"):
            RouterProcess(log_dir=tmp_path, port=port).start(10)


def test_every_policy_that_can_be_asked_for_is_known() -> None:
    from agentrl.config.options import options
    from agentrl.config.schema import Config

    assert set(options(Config)["router_policy"].choices) <= set(POLICIES)
