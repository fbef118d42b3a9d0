"""The pool with fake engines and the real router: replacement, admission, versions."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentrl.engines import pool as pool_module
from agentrl.engines.actor import PENDING, SERVING
from agentrl.engines.engine import EngineSpec
from agentrl.engines.pool import EnginePool
from agentrl.errors import EngineError, WeightSyncError
from agentrl.rollout.policies.sglang import ROUTING_HEADER
from tests.engines.fake_engine import FakeEngine
from tests.weights.test_sync import FakeSender, snapshot, syncing


class FakeLocalEngine:
    """Stands in for ``LocalEngine``. ``started`` holds all ever made; ``refuse`` makes starts fail."""

    started: list[FakeLocalEngine] = []
    refuse = 0

    def __init__(self, spec: EngineSpec, *, name: str, log_dir: str | None, host: str, api_key: str) -> None:
        self.name = name
        self.server = FakeEngine()
        self.server.key = api_key
        self.dead = asyncio.Event()
        FakeLocalEngine.started.append(self)

    async def call(self, method: str, *args: Any) -> Any:
        if method == "start":
            if FakeLocalEngine.refuse > 0:
                FakeLocalEngine.refuse -= 1
                raise EngineError("refused to start on purpose")
            await self.server.start()
            return self.server.url
        assert method == "wait"
        try:
            async with asyncio.timeout(args[0]):
                await self.dead.wait()
        except TimeoutError:
            return None
        return "the last words"

    async def die(self) -> None:
        await self.server.stop()
        self.dead.set()

    async def end(self, grace: float = 2.0) -> None:
        self.grace = grace
        await self.die()


@asynccontextmanager
async def pooled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n: int = 2, **options: Any
) -> AsyncIterator[tuple[EnginePool, FakeSender]]:
    monkeypatch.setattr(pool_module, "LocalEngine", FakeLocalEngine)
    monkeypatch.setattr(FakeLocalEngine, "started", [])
    monkeypatch.setattr(FakeLocalEngine, "refuse", 0)
    options = {"health_interval": 0, "start_timeout": 90} | options
    pool = EnginePool(EngineSpec("m"), n, log_dir=tmp_path, **options)
    sender = FakeSender()
    pool.attach(syncing(sender, deadlines=None))
    try:
        yield pool, sender
    finally:
        await pool.stop()


def engines() -> list[FakeLocalEngine]:
    return FakeLocalEngine.started


async def until(condition: Any, timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


async def update(pool: EnginePool, sender: FakeSender, version: int) -> Any:
    sender.engines = WatchedEngines()
    return await bring(pool, version)


async def bring(pool: EnginePool, version: int) -> Any:
    """What the trainer published as this version, to all engines."""
    pool._updater.snapshot = snapshot(version)
    return await pool.update_weights()


async def generate(pool: EnginePool, deadline: float = 60.0) -> dict[str, Any]:
    """One request through the router, again and again until it is served."""
    key = uuid.uuid4().hex
    async with asyncio.timeout(deadline), aiohttp.ClientSession() as session:
        for attempt in range(10_000):
            headers = {"Authorization": f"Bearer {pool.router_key}", ROUTING_HEADER: f"{key}~{attempt}"}
            async with session.post(pool.router_url + "/generate", json={"input_ids": [1]}, headers=headers) as answer:
                if answer.status == 200:
                    return await answer.json()
            await asyncio.sleep(0.05)
    raise AssertionError


def worker_urls(pool: EnginePool) -> set[str]:
    return {worker["url"] for worker in pool._router.workers()}


async def test_start_serve_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path, n=3) as (pool, _):
        await pool.start()
        assert pool.states() == [SERVING] * 3
        assert worker_urls(pool) == {engine.server.url for engine in engines()}
        await asyncio.gather(*(generate(pool) for _ in range(12)))
    assert [engine.name for engine in engines()] == ["engine-0", "engine-1", "engine-2"]
    assert all(engine.dead.is_set() for engine in engines())
    await pool.stop()


async def test_start_fails_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, _):
        FakeLocalEngine.refuse = 1
        with pytest.raises(EngineError, match="on purpose"):
            await pool.start()
        assert all(engine.dead.is_set() for engine in engines())
        assert not pool._router.is_alive()


async def test_a_dead_engine_is_replaced_and_requests_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, _):
        await pool.start()
        for engine in engines():
            engine.server.generate_seconds = 0.3
        requests = [asyncio.create_task(generate(pool)) for _ in range(16)]
        await asyncio.sleep(0.1)
        await engines()[0].die()
        await asyncio.gather(*requests)
        await until(lambda: len(engines()) == 3 and pool.states() == [SERVING, SERVING])
        assert engines()[2].name == "engine-0-restart-1"
        assert engines()[0].grace == 0, "the next one waits until it is gone"
        assert worker_urls(pool) == {engine.server.url for engine in engines()[1:]}


async def test_a_replacement_is_admitted_only_with_the_current_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path, n=1) as (pool, sender):
        await pool.start()
        await update(pool, sender, 5)
        sender.engines = WatchedEngines()
        await engines()[0].die()
        answer = await generate(pool)
        assert answer["meta_info"]["weight_version"] == "5"
        assert engines()[1].server.version == "5"
        assert not engines()[1].server.paused
        calls = engines()[1].server.calls
        assert calls.index("/generate") > calls.index("/continue_generation")


class WatchedEngines:
    """All engines there are at the time of asking."""

    def __iter__(self) -> Any:
        return iter([engine.server for engine in engines()])


async def test_a_replacement_takes_the_published_weights_while_the_trainer_is_busy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between two syncs the trainer answers nobody: whoever asked it would wait for ever."""
    async with pooled(monkeypatch, tmp_path) as (pool, sender):
        await pool.start()
        await update(pool, sender, 1)
        sender.fail_at = "connect"
        broadcasts = sender.calls.count("broadcast")
        await engines()[0].die()
        await until(lambda: pool.states() == [SERVING, SERVING] and len(engines()) == 3)
        assert (engines()[2].server.version, sender.calls.count("broadcast")) == ("1", broadcasts)
        assert "/update_weights_from_disk" in engines()[2].server.calls
        assert len(worker_urls(pool)) == 2


async def test_a_replacement_that_cannot_have_them_waits_for_the_next_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, sender):
        await pool.start()
        await update(pool, sender, 1)
        pool._updater.restore_from = None
        await engines()[0].die()
        await until(lambda: pool.states() == [PENDING, SERVING])
        await asyncio.sleep(0.2)
        assert pool.states() == [PENDING, SERVING]
        assert len(worker_urls(pool)) == 1
        report = await update(pool, sender, 2)
        assert pool.states() == [SERVING, SERVING]
        assert len(report.synced) == 2
        assert {engine.server.version for engine in engines()[1:]} == {"2"}
        assert len(worker_urls(pool)) == 2


async def test_an_engine_that_fails_a_sync_leaves_traffic_before_it_runs_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, sender):
        await pool.start()
        faulty = engines()[0]
        faulty.server.faults["/update_weights_from_distributed"] = "error"
        removed_before_continue: list[bool] = []
        go_on = faulty.server._continue_generation

        def continue_(body: dict[str, Any]) -> tuple[bool, str]:
            removed_before_continue.append(faulty.server.url not in pool_urls)
            return go_on(body)

        pool_urls: set[str] = {engine.server.url for engine in engines()}
        retire = pool._updater.retire

        async def watched_retire(control: Any) -> None:
            await retire(control)
            pool_urls.discard(control.url)

        pool._updater.retire = watched_retire
        faulty.server._continue_generation = continue_
        report = await update(pool, sender, 3)
        assert list(report.failed) == [faulty.server.url]
        assert removed_before_continue == [True]
        sender.engines = WatchedEngines()
        await until(lambda: pool.states() == [SERVING, SERVING])
        assert engines()[2].server.version == "3"
        assert faulty.dead.is_set()


async def test_an_update_waits_for_a_replacement_when_no_engine_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path, n=1) as (pool, sender):
        await pool.start()
        sender.engines = WatchedEngines()
        engines()[0].server.faults["/begin_weight_update"] = "drop"
        report = await bring(pool, 1)
        assert report.synced == [engines()[1].server.url]
        assert pool.states() == [SERVING]


async def test_the_trainers_own_failure_replaces_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path, n=1) as (pool, sender):
        await pool.start()
        sender.fail_at = "listen"
        with pytest.raises(WeightSyncError, match="on purpose"):
            await update(pool, sender, 1)
        assert pool.states() == [SERVING]
        assert len(engines()) == 1


async def test_a_hung_engine_is_found_and_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path, health_interval=0.1, health_timeout=1.0) as (pool, _):
        await pool.start()
        hung = engines()[1].server
        hung.faults["/health_generate"] = "hang"
        hung.fault_times["/health_generate"] = 99
        await until(lambda: len(engines()) == 3 and pool.states() == [SERVING, SERVING])
        assert engines()[1].dead.is_set()
        assert not engines()[0].dead.is_set()


async def test_one_missed_check_is_forgiven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path, n=1, health_interval=0.05, health_timeout=1.0) as (pool, _):
        await pool.start()
        engines()[0].server.faults["/health_generate"] = "hang"
        await until(lambda: engines()[0].server.calls.count("/health_generate") == 3)
        assert len(engines()) == 1


async def test_it_gives_up_when_replacements_do_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path, n=1, max_failed_starts=2) as (pool, sender):
        await pool.start()
        FakeLocalEngine.refuse = 99
        await engines()[0].die()
        with pytest.raises(EngineError, match="2 replacements in a row did not start"):
            await asyncio.wait_for(update(pool, sender, 1), 60)


@pytest.mark.parametrize("least", [1, 2])
async def test_a_place_whose_engines_never_last_is_given_up_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int
) -> None:
    async with pooled(monkeypatch, tmp_path, min_engines=least) as (pool, _):
        await pool.start()
        for deaths in (1, 2, 3):
            name = f"engine-0-restart-{deaths - 1}" if deaths > 1 else "engine-0"
            await next(engine for engine in engines() if engine.name == name).die()
            if deaths < 3:
                await until(lambda made=2 + deaths: len(engines()) == made and pool.states()[0] == SERVING)
            else:
                await until(lambda: pool._places[0].given_up)
        assert len(engines()) == 4 and pool.states()[1] == SERVING
        if least == 1:
            await generate(pool)
            assert pool.broken is None
        else:
            assert "1 engines of at least 2 are left" in await asyncio.wait_for(pool.wait_until_broken(), 60)


async def test_an_engine_that_lasted_is_replaced_however_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool_module, "_LASTS_S", 0.0)
    async with pooled(monkeypatch, tmp_path, n=1) as (pool, _):
        await pool.start()
        for deaths in range(1, 5):
            await engines()[-1].die()
            await until(lambda made=deaths + 1: len(engines()) == made and pool.states() == [SERVING])


async def test_a_killed_router_comes_back_at_the_same_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, _):
        await pool.start()
        url = pool.router_url
        killed = pool._router
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: pool._router is not killed)

        async def served() -> None:
            while True:
                try:
                    await generate(pool)
                    return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)

        await asyncio.wait_for(served(), 60)
        assert pool.router_url == url
        await until(lambda: len(worker_urls(pool)) == 2)


async def test_a_router_whose_port_is_taken_for_a_while_comes_back_at_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, _):
        await asyncio.to_thread(pool._router.start, 60)
        url, port = pool.router_url, pool._router.port
        await asyncio.to_thread(pool._router.stop)
        with socket.create_server(("127.0.0.1", port)):
            restarting = asyncio.create_task(pool._restart_router())
            await until(lambda: f"port {port} on 127.0.0.1 is in use" in caplog.text)
        assert await restarting and pool.router_url == url and pool._router.is_healthy()


async def test_a_router_that_stands_still_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("agentrl.engines.pool._WAIT_SLICE_S", 0.1)
    async with pooled(monkeypatch, tmp_path, n=1, health_interval=60.0, health_timeout=0.5) as (pool, _):
        await pool.start()
        stopped = pool._router
        os.kill(stopped.pid, signal.SIGSTOP)
        await until(lambda: pool._router is not stopped and pool._router.is_healthy())


async def test_no_request_waits_for_a_machine_that_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody closes its connections: the router would hold them until the kernel gives them up, after minutes."""
    monkeypatch.setattr(pool_module, "RayEngine", lambda options, *args, **kwargs: FakeLocalEngine(*args, **kwargs))
    gone: list[str] = []
    monkeypatch.setattr(pool_module, "machine_answers", lambda url, timeout: url not in gone)
    async with pooled(monkeypatch, tmp_path, ray_options=[{}, {}]) as (pool, _):
        await pool.start()
        router, url = pool._router, pool.router_url
        await engines()[0].die()
        await until(lambda: len(engines()) == 3 and pool.states() == [SERVING, SERVING])
        assert pool._router is router, "a process that ended closed its own"
        gone.append(engines()[1].server.url)
        await engines()[1].die()
        await until(lambda: len(engines()) == 4 and pool._router is not router and pool.states() == [SERVING, SERVING])
        assert pool.router_url == url
        await until(lambda: worker_urls(pool) == {engines()[2].server.url, engines()[3].server.url})
        await generate(pool)


def test_wrong_sizes() -> None:
    with pytest.raises(EngineError, match="a pool of 0 engines; expected at least one"):
        EnginePool(EngineSpec("m"), 0)
    with pytest.raises(EngineError, match="a pool of 2 engines with 1 Ray options; give one an engine"):
        EnginePool(EngineSpec("m"), 2, ray_options=[{}])
