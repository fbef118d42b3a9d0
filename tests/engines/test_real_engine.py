"""Real SGLang engines on the CPU: keys, sockets, weights, faults. One engine serves most of the tests."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from sockets import listening

from agentrl.engines.actor import PENDING, SERVING
from agentrl.engines.control import EngineControl
from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.engines.pool import EnginePool, SyncFailed
from agentrl.errors import EngineError
from agentrl.processes.tree import is_running
from agentrl.rollout.policies import sglang
from agentrl.rollout.policies.sglang import ROUTING_HEADER, EngineClient, new_rid
from agentrl.rollout.sampling import request_fields
from agentrl.types import Generation, SamplingParams
from agentrl.weights.publisher import Publisher
from agentrl.weights.sender import BroadcastSender, LocalSender
from agentrl.weights.sync import WeightSync
from agentrl.weights.transports.base import Deadlines
from agentrl.weights.transports.broadcast import Broadcast
from agentrl.weights.transports.files import Files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [11, 12, 13, 14]


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> EngineSpec:
    return EngineSpec(str(tiny_model), max_total_tokens=8192)


@pytest.fixture(scope="module")
def engine(spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    engine = EngineProcess(spec, log_dir=tmp_path_factory.mktemp("logs"))
    engine.start(240)
    yield engine
    engine.stop()


@pytest.fixture
def weights(tiny_model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(tiny_model / "model.safetensors")


class Trainer:
    """The trainer's end: publishes ``weights`` as they are, and the sync that brings them to engines."""

    def __init__(
        self, weights: dict[str, torch.Tensor], folder: Path, *, transport: str = "broadcast", **options: Any
    ) -> None:
        bucket_bytes = options.pop("bucket_bytes", 1 << 20)
        self.weights = weights
        self.publisher = Publisher(
            lambda: iter(weights.items()), folder, bucket_bytes=bucket_bytes, tied_embeddings=True
        )
        files, broadcast = Files(), Broadcast(LocalSender(BroadcastSender(self.publisher)))
        self.sync = WeightSync(files if transport == "files" else broadcast, restore=files, **options)

    def publish(self, version: int) -> None:
        self.sync.snapshot = self.publisher.publish(version)

    async def bring(self, engine: EngineControl, version: int) -> Any:
        self.publish(version)
        return await self.sync.update([engine])

    async def close(self) -> None:
        await self.sync.close()
        self.publisher.remove()


def change(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.mul_(1.0 + 0.5 * torch.rand_like(tensor))


async def generate(url: str, key: str, n: int = 8, **params: Any) -> dict[str, Any]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True, **params},
        "return_logprob": True,
        "rid": uuid.uuid4().hex,
    }
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(url + "/generate", json=body, timeout=aiohttp.ClientTimeout(total=120)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.json()


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]


async def test_closed_by_default(engine: EngineProcess) -> None:
    """Every route but health asks for the key; all sockets are on loopback; the key is shown nowhere."""
    async with aiohttp.ClientSession() as session:
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/abort_request"):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                async with session.post(engine.url + path, json={}, headers=headers) as answer:
                    assert answer.status == 401, path
        for path in ("/model_info", "/server_info"):
            async with session.get(engine.url + path) as answer:
                assert answer.status == 401, path
    tree = engine.tree()
    assert len(tree) == 3
    assert {host for host, _ in listening(proc.pid for proc in tree)} == {"127.0.0.1"}
    for proc in tree:
        assert engine.api_key.encode() not in Path(f"/proc/{proc.pid}/cmdline").read_bytes()
    log = engine.log_path.read_text()
    assert "api_key" in log
    assert engine.api_key not in log


async def test_an_idle_engine_costs_no_cpu(engine: EngineProcess) -> None:
    """The whole tree; the bound is generous for a loaded machine, the benchmark measures it."""
    await generate(engine.url, engine.api_key)
    await asyncio.sleep(1)
    before = cpu_seconds(engine)
    await asyncio.sleep(5)
    assert (cpu_seconds(engine) - before) / 5 < 0.04


async def test_a_paused_engine_costs_no_cpu_and_goes_on(engine: EngineProcess) -> None:
    control = EngineControl(engine.url, engine.api_key)
    try:
        running = asyncio.create_task(generate(engine.url, engine.api_key, n=600))
        await asyncio.sleep(0.7)
        await control.pause("retract")
        await asyncio.sleep(0.5)
        before = cpu_seconds(engine)
        await asyncio.sleep(3)
        assert (cpu_seconds(engine) - before) / 3 < 0.1 and not running.done()
        await control.continue_()
        assert len((await running)["output_ids"]) == 600
    finally:
        await control.close()


@pytest.mark.heavy
async def test_a_health_check_has_the_time_it_is_given(engine: EngineProcess) -> None:
    """More than SGLang's own 20 s: a step of a large batch takes that where other work fills the machine."""
    (scheduler,) = [proc for proc in engine.tree() if "scheduler" in " ".join(proc.cmdline())]
    control = EngineControl(engine.url, engine.api_key)
    scheduler.suspend()
    try:
        asked = asyncio.create_task(control.can_generate(timeout=120))
        done, _ = await asyncio.wait([asked], timeout=30)
        assert not done
        scheduler.resume()
        assert await asked
    finally:
        scheduler.resume()
        await control.close()


def cpu_seconds(engine: EngineProcess) -> float:
    ticks = 0
    for proc in engine.tree():
        fields = Path(f"/proc/{proc.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("transport", "mode", "bucket_bytes"),
    [("broadcast", "retract", 1 << 20), ("broadcast", "in_place", 30_000), ("broadcast", "abort", 1 << 20),
     ("files", "retract", 30_000)],
)  # fmt: skip
async def test_a_sync_brings_weights_version_and_equal_checksums(
    engine: EngineProcess,
    weights: dict[str, torch.Tensor],
    transport: str,
    mode: str,
    bucket_bytes: int,
    tmp_path: Path,
) -> None:
    before = logprobs(await generate(engine.url, engine.api_key))
    loads_in_threads = engine.log_path.read_text().count("Multi-thread loading")
    assert loads_in_threads, "SGLang says so of its start"
    change(weights)
    control = EngineControl(engine.url, engine.api_key)
    trainer = Trainer(weights, tmp_path, transport=transport, pause_mode=mode, bucket_bytes=bucket_bytes)
    try:
        for version in (41, 42):
            report = await trainer.bring(control, version)
            assert report.synced == [engine.url]
            # Embedding, final norm, and per layer: qkv, o, gate_up, down, four norms.
            assert report.verified == 2 + 2 * 8
            answer = await generate(engine.url, engine.api_key)
            assert answer["meta_info"]["weight_version"] == str(version)
        assert logprobs(answer) != before
        assert await control.version() == "42"
        assert engine.log_path.read_text().count("Multi-thread loading") == loads_in_threads
    finally:
        await trainer.close()
        await control.close()


async def test_what_the_trainer_does_not_send_and_a_single_changed_value_are_found(
    engine: EngineProcess, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Without a word about how this family fuses its parameters."""
    control = EngineControl(engine.url, engine.api_key)
    forgotten = weights.pop("model.layers.1.post_attention_layernorm.weight")
    partial = Trainer(weights, tmp_path / "partial")
    weights = {**weights, "model.layers.1.post_attention_layernorm.weight": forgotten}
    trainer = Trainer(weights, tmp_path / "whole")
    try:
        with pytest.raises(SyncFailed, match=r"1 of 18 parameters that the trainer never sends \(.*layers.1.post_att"):
            await partial.bring(control, 1)
        await trainer.bring(control, 1)
        held = (await control.checksums())[0]
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
        await trainer.bring(control, 2)
        now = (await control.checksums())[0]
        assert [name for name in held if held[name] != now[name]] == ["model.layers.1.mlp.gate_up_proj.weight"]
        assert (await trainer.sync.restore(control)).verified == len(held), "files give what the broadcast gave"
    finally:
        await partial.close()
        await trainer.close()
        await control.close()


async def generating(url: str, key: str) -> None:
    """Returns when a request that was sent last has its first token: those before it are in flight then."""
    body = {"input_ids": [7], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}, "stream": True}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(url + "/generate", json=body, timeout=aiohttp.ClientTimeout(total=120)) as answer,
    ):
        await answer.content.readline()


def recomputed(model_dir: Path, weights: list[dict[str, torch.Tensor]], ids: list[int], cut: int) -> list[float]:
    """Log-probability of each id but the first, by the last of the weights over the keys and values that the first
    computed of ``ids[:cut]``."""
    from transformers import DynamicCache, Qwen3ForCausalLM

    model, cache, found = Qwen3ForCausalLM.from_pretrained(model_dir), DynamicCache(), []
    for state, part in ((weights[0], ids[:cut]), (weights[-1], ids[cut:])):
        if part:
            model.load_state_dict(state, strict=False)  # the output layer is the embedding
            with torch.no_grad():
                found.append(model(torch.tensor([part]), past_key_values=cache).logits[0].log_softmax(-1))
    return torch.cat(found)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


@pytest.mark.parametrize(
    ("transport", "mode"), [("files", "retract"), ("files", "in_place"), ("broadcast", "in_place"), ("files", "abort")]
)
async def test_every_token_has_the_log_probability_of_its_version(
    engine: EngineProcess,
    weights: dict[str, torch.Tensor],
    tiny_model: Path,
    transport: str,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a request in flight at an update, of which all tokens come back; of the next turn; and of a new request."""
    monkeypatch.setattr(sglang, "_sampling_json", lambda params: {**request_fields(params), "ignore_eos": True})
    control = EngineControl(engine.url, engine.api_key)
    trainer = Trainer(weights, tmp_path, transport=transport, pause_mode=mode)
    prompt, ids = [3 + i * 7 % 490 for i in range(64)], [5 + i * 11 % 490 for i in range(64)]
    before = {name: tensor.clone() for name, tensor in weights.items()}

    def close(found: Generation, ids: list[int], weights: list[dict[str, torch.Tensor]], cut: int) -> np.ndarray:
        expected = recomputed(tiny_model, weights, [*ids, *found.tokens.tolist()], cut)[len(ids) - 1 :]
        return np.abs(found.logprobs - np.array(expected)) < 1e-4

    async with EngineClient(engine.url, engine.api_key) as client:

        async def ask(ids: list[int], n: int) -> Generation:
            given, params = np.array(ids, np.int32), SamplingParams(max_new_tokens=n)
            return await client.generate(given, params, rid=new_rid(), routing_key="k", timeout=120)

        try:
            await trainer.bring(control, 1)
            await ask(prompt, 1)  # now the cache has it
            running = asyncio.create_task(ask(ids, 600))
            await generating(engine.url, engine.api_key)
            change(weights)
            await trainer.bring(control, 2)
            new = await ask(prompt, 8)
            assert new.cached_tokens == 0 and close(new, prompt, [weights], 0).all(), "old weights leave nothing"
            assert (await ask(prompt, 8)).cached_tokens == len(prompt) - 1

            answer = await running
            old = int((answer.versions == 1).sum())
            assert len(answer.tokens) == 600 and 0 < old < 600 and (np.diff(answer.versions) >= 0).all()
            assert close(answer, ids, [before], 0)[:old].all()
            anew, kept = close(answer, ids, [weights], 0), close(answer, ids, [before, weights], len(ids) + old - 1)
            (right, other) = (kept, anew) if mode == "in_place" else (anew, kept)
            assert right[old:].all() and other[old:].mean() < 0.5

            turn = [*ids, *answer.tokens.tolist(), 9, 8]
            after = await ask(turn, 8)
            assert close(after, turn, [weights], 0).all()
            assert after.cached_tokens == (0 if mode == "in_place" else len(turn) - 3)
        finally:
            await trainer.close()
            await control.close()


async def test_a_sender_that_dies_in_a_sync_leaves_the_engine_running(
    engine: EngineProcess, weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first bucket: no session stays open, and the next sync is whole."""
    control = EngineControl(engine.url, engine.api_key)
    trainer = Trainer(weights, tmp_path, bucket_bytes=1, verify=False)
    flat = trainer.publisher.flat

    def breaks(index: int) -> torch.Tensor:
        if index == 5:
            raise RuntimeError("the sender broke")
        return flat(index)

    try:
        monkeypatch.setattr(trainer.publisher, "flat", breaks)
        with pytest.raises(SyncFailed, match="the sender broke") as caught:
            await trainer.bring(control, 8)
        assert list(caught.value.report.failed) == [engine.url]
        assert len((await generate(engine.url, engine.api_key))["output_ids"]) == 8
        monkeypatch.undo()
        assert (await trainer.bring(control, 9)).synced == [engine.url]
    finally:
        await trainer.close()
        await control.close()


@pytest.mark.heavy
async def test_pool_of_real_engines(
    spec: EngineSpec, weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines through the router; one is killed while requests run, one hangs in a sync."""
    monkeypatch.setenv("AGENTRL_TMPDIR", str(tmp_path / "scratch"))
    pool = EnginePool(spec, 2, log_dir=tmp_path, health_interval=0)
    limits = Deadlines(pause=4.0, bucket=8.0, resume=2.0)
    trainer = Trainer(weights, tmp_path / "published", deadlines=limits)
    pool.attach(trainer.sync)
    trees = []
    try:
        await pool.start()
        change(weights)
        trainer.publish(1)
        report = await pool.update_weights()
        assert len(report.synced) == 2
        await kill_while_requests_run(pool, trees)
        await stop_one_in_a_sync(pool, trainer)
        trees += [proc for place in pool._places for proc in place.engine._actor._engine.tree()]
    finally:
        await pool.stop()
    assert len(trees) >= 6
    assert not any(is_running(proc) for proc in trees)
    assert list((tmp_path / "scratch").iterdir()) == []


async def routed(pool: EnginePool, n: int) -> dict[str, Any]:
    """A request as the rollout's client sends it: again under another key until it is answered."""
    key = uuid.uuid4().hex
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        for attempt in range(1000):
            headers = {"Authorization": f"Bearer {pool.router_key}", ROUTING_HEADER: f"{key}~{attempt}"}
            async with session.post(pool.router_url + "/generate", json=body, headers=headers) as answer:
                if answer.status == 200:
                    return await answer.json()
            await asyncio.sleep(0.1)
    raise AssertionError("never served")


async def kill_while_requests_run(pool: EnginePool, trees: list[Any]) -> None:
    place = pool._places[0]
    victim, killed = place.engine._actor._engine, place.control
    trees += victim.tree()
    requests = [asyncio.create_task(routed(pool, 300)) for _ in range(8)]
    await asyncio.sleep(0.7)
    os.kill(victim.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*requests)
    assert all(len(answer["output_ids"]) == 300 for answer in answers)
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {"1"}
    async with asyncio.timeout(120):
        # On a fast machine the other engine has served all before the pool has seen this one end.
        while place.state != SERVING or place.control is killed:
            assert place.state != PENDING or await place.control.version() in ("default", "1")
            await asyncio.sleep(0.1)
    assert await place.control.version() == "1"
    first, second = [(await control.checksums())[0] for control in pool.engines()]
    assert first == second


async def stop_one_in_a_sync(pool: EnginePool, trainer: Trainer) -> None:
    """SIGSTOP of a scheduler: the other engine gets the version, the stopped one is replaced."""
    place = pool._places[1]
    scheduler = place.engine._actor._engine.tree()[1].pid
    stopped = place.control.url
    change(trainer.weights)
    trainer.publish(2)
    os.kill(scheduler, signal.SIGSTOP)
    report = await pool.update_weights()
    assert list(report.failed) == [stopped]
    assert len(report.synced) == 1
    async with asyncio.timeout(120):
        while pool.states() != [SERVING, SERVING]:
            await asyncio.sleep(0.1)
    assert [await control.version() for control in pool.engines()] == ["2", "2"]


def test_a_damaged_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    broken = EngineProcess(EngineSpec(str(tmp_path)), log_dir=tmp_path / "logs")
    with pytest.raises(EngineError, match="engine-0 did not start"):
        broken.start(120)
    assert not broken.is_alive()
