"""The pool when things happen at the same time: a death while weights arrive, or while it is admitted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.actor import SERVING
from agentrl.engines.control import EngineControl
from agentrl.engines.engine import EngineSpec
from agentrl.engines.pool import EnginePool
from tests.engines.test_pool import engines, pooled, until, update, worker_urls


def blocked(pool: EnginePool) -> tuple[asyncio.Event, asyncio.Event]:
    """Have weights wait before they reach a replacement; the events say that they do, and let them go on."""
    waiting, go_on = asyncio.Event(), asyncio.Event()
    restore = pool._updater.restore

    async def wait_first(engine: EngineControl) -> Any:
        waiting.set()
        await go_on.wait()
        return await restore(engine)

    pool._updater.restore = wait_first
    return waiting, go_on


async def test_a_replacement_that_dies_while_it_gets_its_weights_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, sender):
        await pool.start()
        await update(pool, sender, 1)
        waiting, go_on = blocked(pool)
        await engines()[0].die()
        await asyncio.wait_for(waiting.wait(), 60)
        await engines()[2].die()
        await until(lambda: len(engines()) == 4)
        go_on.set()
        await until(lambda: pool.states() == [SERVING, SERVING])
        await asyncio.sleep(0.5)
        assert pool.states() == [SERVING, SERVING]
        assert [engine.name for engine in engines()[2:]] == ["engine-0-restart-1", "engine-0-restart-2"]
        assert worker_urls(pool) == {engines()[1].server.url, engines()[3].server.url}


async def test_an_engine_that_dies_while_it_is_admitted_does_not_count_as_serving(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path, n=1) as (pool, _):
        await pool.start()
        place = pool._places[0]
        add, removed = pool._router.add_worker, []

        def add_slowly(*args: Any, **kwargs: Any) -> None:
            add(*args, **kwargs)
            place.engine = place.control = None  # what its death does
            place.state = "dead"

        monkeypatch.setattr(pool._router, "add_worker", add_slowly)
        monkeypatch.setattr(pool._router, "remove_worker", lambda url: removed.append(url))
        engine, url = place.engine, place.control.url
        await pool._admit(place)
        assert (place.state, removed) == ("dead", [url])
        await engine.end()


def test_engines_of_one_run_have_seeds_of_their_own() -> None:
    pool = EnginePool(EngineSpec("m", seed=7), 3)
    seeds = [place.own(pool.spec, 3).seed for place in pool._places]
    pool._places[0].incarnation = 1
    seeds.append(pool._places[0].own(pool.spec, 3).seed)
    assert seeds == [7, 8, 9, 10]
    assert "--random-seed" in EngineSpec("m", seed=7).server_arguments()
    assert "--random-seed" not in EngineSpec("m").server_arguments()


def test_engines_that_nobody_places_take_gpus_of_their_own() -> None:
    pool = EnginePool(EngineSpec("m", device="cuda", tp=2), 2)
    arguments = [place.own(pool.spec, 2, placed=False).server_arguments() for place in pool._places]
    assert [words[words.index("--base-gpu-id") + 1] for words in arguments] == ["0", "2"]
    assert "--base-gpu-id" not in pool._places[1].own(pool.spec, 2).server_arguments()
