"""Engines behind a network that is slow or breaks: slow is not dead, and what does not answer is replaced."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines import pool as pool_module
from agentrl.engines.actor import SERVING
from agentrl.engines.control import EngineControl
from agentrl.weights.transports.base import Deadlines
from tests.engines.fake_engine import KEY, FakeEngine
from tests.engines.test_pool import FakeLocalEngine, bring, engines, generate, pooled, until
from tests.slow_network import RESET, STALL, VANISH, SlowNetwork
from tests.weights.test_sync import FakeSender, attempt, syncing

DISTANT = {"delay": 0.2, "jitter": 0.1}


class DistantEngine(FakeLocalEngine):
    """One that is reached through a network of its own."""

    how: dict[str, Any] = {}

    async def call(self, method: str, *args: Any) -> Any:
        if method != "start":
            return await super().call(method, *args)
        self.network = await SlowNetwork(await super().call(method, *args), **self.how).__aenter__()
        return self.network.url

    async def end(self, grace: float = 2.0) -> None:
        await super().end(grace)
        await self.network.__aexit__()


@asynccontextmanager
async def distant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: dict[str, Any], **options: Any) -> Any:
    async with pooled(monkeypatch, tmp_path, **options) as (pool, sender):
        monkeypatch.setattr(pool_module, "LocalEngine", DistantEngine)
        monkeypatch.setattr(DistantEngine, "how", how)
        await pool.start()
        yield pool, sender


async def test_an_engine_that_is_merely_slow_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    health = {"health_interval": 0.1, "health_timeout": 5.0}
    async with distant(monkeypatch, tmp_path, DISTANT | {"stall_s": 0.5}, n=2, **health) as (pool, sender):
        checks = [engine.server.calls for engine in engines()]
        engines()[0].network.always = STALL
        sender.engines = [engine.server for engine in engines()]
        assert (await bring(pool, 3)).failed == {}
        await asyncio.gather(*(generate(pool) for _ in range(8)))
        await until(lambda: all(calls.count("/health_generate") >= 2 for calls in checks))
        assert pool.states() == [SERVING] * 2 and len(engines()) == 2


async def test_an_engine_that_nobody_reaches_any_more_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its connections stay open, so that only the deadline of its health checks tells."""
    async with distant(monkeypatch, tmp_path, {}, n=2, health_interval=0.1, health_timeout=1.0) as (pool, _):
        gone = engines()[0]
        gone.network.always = VANISH
        await until(lambda: len(engines()) == 3 and pool.states() == [SERVING] * 2)
        assert gone.dead.is_set() and not engines()[1].dead.is_set()


@asynccontextmanager
async def behind(networks: list[dict[str, Any]]) -> AsyncIterator[tuple[list[FakeEngine], list[SlowNetwork], Any, Any]]:
    """An engine behind each network: engines, networks, control, the trainer's end."""
    async with AsyncExitStack() as stack:
        fakes = [await FakeEngine().start() for _ in networks]
        ways = [await stack.enter_async_context(SlowNetwork(e.url, **n)) for e, n in zip(fakes, networks, strict=True)]
        controls = [EngineControl(way.url, KEY) for way in ways]
        try:
            yield fakes, ways, controls, FakeSender(fakes)
        finally:
            for control in controls:
                await control.close()
            for fake in fakes:
                await fake.stop()


TRANSPORTS = ("broadcast", "files")


async def test_weights_reach_engines_over_a_slow_network() -> None:
    far = {"delay": 0.1, "jitter": 0.1}
    stalls = far | {"stall_s": 0.5, "always": STALL}

    async def through(transport: str) -> None:
        async with behind([{}, far, stalls]) as (fakes, _, controls, sender):
            sync = syncing(sender, transport=transport, deadlines=Deadlines())
            for version in (1, 2):
                report = await attempt(sync, controls, version)
                assert report.failed == {} and [fake.version for fake in fakes] == [str(version)] * 3
            assert not any(fake.paused for fake in fakes)

    await asyncio.gather(*map(through, TRANSPORTS))


async def test_an_engine_whose_answer_to_an_update_is_lost_is_replaced_and_the_others_go_on() -> None:
    """It may have the version or not: nobody knows."""

    soon = Deadlines(pause=2.0, connect=2.0, bucket=2.0, disk=2.0, resume=1.5, verify=2.0)

    async def lost(transport: str, fault: str) -> None:
        async with behind([{}, {"stall_s": 60}]) as (fakes, networks, controls, sender):
            sync = syncing(sender, transport=transport, deadlines=soon)
            assert (await attempt(sync, controls, 1)).failed == {}
            networks[1].always = fault
            async with asyncio.timeout(60):
                report = await attempt(sync, controls, 2)
            assert list(report.failed) == [networks[1].url] and report.synced == [networks[0].url]
            assert fakes[0].version == "2" and not fakes[0].paused

    await asyncio.gather(*(lost(*case) for case in itertools.product(TRANSPORTS, (STALL, VANISH, RESET))))
