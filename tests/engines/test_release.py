"""Engines give their memory back and have it again: the pool with fake engines, and a real one on the CPU."""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path

import psutil
import pytest
import torch

from agentrl.engines import pool as pool_module
from agentrl.engines.actor import SERVING
from agentrl.engines.control import EngineControl
from agentrl.engines.cpu_backend import discard
from agentrl.engines.engine import EngineProcess, EngineSpec
from tests.engines.conftest import make_checkpoint
from tests.engines.test_pool import FakeLocalEngine, bring, engines, generate, pooled, until, update
from tests.engines.test_real_engine import Trainer, logprobs
from tests.engines.test_real_engine import generate as generated_by

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


async def test_released_engines_are_asked_for_nothing_until_they_have_weights_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path, health_interval=0.01, health_timeout=5) as (pool, sender):
        await pool.start()
        await update(pool, sender, 0)
        await pool.release()
        calls = [engine.server.calls for engine in engines()]
        before = [len(asked) for asked in calls]
        waiting = asyncio.create_task(generate(pool))
        await until(lambda: "/generate" in calls[0] + calls[1])
        await asyncio.sleep(0.1)  # ten health checks
        asked = [path for done, all_of_it in zip(before, calls, strict=True) for path in all_of_it[done:]]
        assert [path for path in asked if path != "/health"] == ["/generate"], "which waits, at a paused engine"
        await update(pool, sender, 1)
        assert (await waiting)["meta_info"]["weight_version"] == "1"
        assert all(asked.count(RESUME) == 1 for asked in calls), "SGLang's scheduler ends at a second one"
        assert all(asked.index(RESUME) > asked.index(RELEASE) for asked in calls)
        await pool.release()
        await pool.release()
        assert all(asked.count(RELEASE) == 2 for asked in calls), "once each time: buffers are stashed before they go"
        await bring(pool, 1)
        assert (await generate(pool))["meta_info"]["weight_version"] == "1", "the same weights again"


@pytest.mark.parametrize("refused", [RELEASE, RESUME])
async def test_one_that_does_not_is_ended_and_replaced_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: str
) -> None:
    async with pooled(monkeypatch, tmp_path) as (pool, sender):
        await pool.start()
        await update(pool, sender, 0)
        broken, sound = engines()
        broken.server.faults[refused] = "error"
        await pool.release()
        if refused == RELEASE:
            assert broken.dead.is_set(), "its memory is free"
            await asyncio.sleep(0.05)
            assert len(engines()) == 2, "there is no room for another"
        await update(pool, sender, 1)
        await until(lambda: pool.states() == [SERVING, SERVING])
        assert broken.dead.is_set() and not sound.dead.is_set()
        assert [engine.server.version for engine in engines()[1:]] == ["1", "1"]


async def test_one_that_starts_meanwhile_is_waited_for_and_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    call = FakeLocalEngine.call

    async def start_when_told(self: FakeLocalEngine, method: str, *args: float) -> object:
        if method == "start" and len(engines()) > 2:
            await gate.wait()
        return await call(self, method, *args)

    async with pooled(monkeypatch, tmp_path) as (pool, sender):
        await pool.start()
        await update(pool, sender, 0)
        monkeypatch.setattr(pool_module.LocalEngine, "call", start_when_told)
        await engines()[0].die()
        await until(lambda: len(engines()) == 3)
        releasing = asyncio.create_task(pool.release())
        await asyncio.sleep(0.05)
        assert not releasing.done(), "it has memory"
        gate.set()
        await releasing
        assert RELEASE in engines()[2].server.calls
        await update(pool, sender, 1)
        assert pool.states() == [SERVING, SERVING] and engines()[2].server.version == "1"


async def test_one_that_died_before_is_gone_when_the_memory_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = asyncio.Event()
    end = FakeLocalEngine.end

    async def end_when_told(self: FakeLocalEngine, grace: float = 2.0) -> None:
        await gone.wait()
        await end(self, grace)

    async with pooled(monkeypatch, tmp_path) as (pool, sender):
        await pool.start()
        await update(pool, sender, 0)
        monkeypatch.setattr(FakeLocalEngine, "end", end_when_told)
        await engines()[0].die()
        await until(lambda: pool.states() != [SERVING, SERVING])
        releasing = asyncio.create_task(pool.release())
        await until(lambda: RELEASE in engines()[1].server.calls)
        await asyncio.sleep(0.05)
        assert not releasing.done(), "of its processes some may live"
        gone.set()
        await releasing
        assert len(engines()) == 2
        await update(pool, sender, 1)
        await until(lambda: pool.states() == [SERVING, SERVING])


async def test_one_that_dies_without_its_memory_comes_back_with_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with pooled(monkeypatch, tmp_path, n=1) as (pool, sender):
        await pool.start()
        await update(pool, sender, 0)
        await pool.release()
        await engines()[0].die()
        await until(lambda: pool.states() != [SERVING])
        await asyncio.sleep(0.05)
        assert len(engines()) == 1
        await update(pool, sender, 1)
        assert pool.states() == [SERVING] and engines()[1].server.version == "1"
        assert RESUME not in engines()[1].server.calls, "it was never released"


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_discarded_tensors_hold_no_memory_and_can_be_written_again() -> None:
    size = 64 << 20
    tensor = torch.ones(size, dtype=torch.uint8)
    small, before = torch.ones(100), resident()
    discard([tensor, tensor[10:20], small])
    assert before - resident() > 0.9 * size
    assert small.sum() == 100, "it shares its page with others"
    assert tensor[mmap.PAGESIZE : -mmap.PAGESIZE].sum() == 0
    tensor.fill_(2)
    assert tensor.sum() == 2 * size


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_real_engine_gives_its_memory_back_and_answers_as_before(tmp_path: Path) -> None:
    """Also a request that was in flight goes on, from its tokens."""
    from safetensors.torch import load_file

    model = make_checkpoint(tmp_path / "model", ffn=32768)
    weights = load_file(model / "model.safetensors")
    size = sum(tensor.nbytes for tensor in weights.values())
    engine = EngineProcess(EngineSpec(str(model), max_total_tokens=8192), log_dir=tmp_path)
    engine.start(240)
    trainer = Trainer(weights, tmp_path / "weights", transport="files")
    control = EngineControl(engine.url, engine.api_key)
    try:
        await trainer.bring(control, 0)
        before = await generated_by(engine.url, engine.api_key)
        await generated_by(engine.url, engine.api_key, n=1000)  # what generating itself takes is there from now on
        held = own_memory(engine)
        running = asyncio.create_task(generated_by(engine.url, engine.api_key, n=1000))
        await asyncio.sleep(0.5)
        await control.release(timeout=60)
        assert not running.done()
        assert held - own_memory(engine) > 0.9 * size > 10 << 20
        assert not await control.can_generate(timeout=1)
        await control.resume(timeout=60)
        await control.resume(timeout=60)
        await trainer.sync.update([control])
        assert len((await running)["output_ids"]) == 1000
        again = await generated_by(engine.url, engine.api_key)
        # What was cached of the prompt differs, and with it how sums are rounded.
        assert again["output_ids"] == before["output_ids"]
        assert logprobs(again) == pytest.approx(logprobs(before), abs=1e-5)
    finally:
        await trainer.close()
        await control.close()
        engine.stop()


def own_memory(engine: EngineProcess) -> int:
    """Bytes that an engine's processes hold, files aside: a library's share changes with who else has it open."""
    rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in engine.tree()]
    held = [line.split()[1] for text in rollups for line in text.splitlines() if line.startswith("Pss_Anon:")]
    return sum(map(int, held)) << 10
