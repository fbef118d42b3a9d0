"""``--deterministic`` on a real engine: a request is answered alike whatever else there is, bit for bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from agentrl.engines.control import EngineControl
from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.rollout.policies.sglang import EngineClient, new_rid
from agentrl.types import Generation, SamplingParams, replace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def requests(n: int) -> list[tuple[np.ndarray, SamplingParams]]:
    """Prompts that share beginnings, around the length of a block of keys, each with its seed."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 500) for _ in range(560)]
    made = []
    for seed in range(n):
        ids = shared[: rng.choice([0, 30, 470, 511, 560])] + [
            rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))
        ]
        params = SamplingParams(max_new_tokens=rng.randrange(2, 40), seed=rng.getrandbits(63) - seed)
        made.append((np.array(ids, np.int32), params))
    return made


@pytest.fixture
async def client(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[EngineClient, EngineControl]]:
    spec = EngineSpec(str(tiny_model), max_total_tokens=16384, deterministic=True)
    engine = EngineProcess(spec, log_dir=tmp_path)
    await asyncio.to_thread(engine.start, 240)
    control = EngineControl(engine.url, engine.api_key)
    try:
        async with EngineClient(engine.url, engine.api_key) as client:
            yield client, control
    finally:
        await control.close()
        await asyncio.to_thread(engine.stop)


def same(one: Generation, other: Generation) -> bool:
    return one.tokens.tobytes() == other.tokens.tobytes() and one.logprobs.tobytes() == other.logprobs.tobytes()


async def test_an_answer_does_not_depend_on_batch_prefix_cache_or_interruption(client):
    client, control = client
    given = requests(12)

    async def ask(ids: np.ndarray, params: SamplingParams) -> Generation:
        return await client.generate(ids, params, rid=new_rid(), routing_key="k", timeout=120)

    alone = []
    for request in given:
        await control._post("/flush_cache", {}, timeout=30)
        alone.append(await ask(*request))
    assert sum(a.cached_tokens for a in alone) == 0
    await control._post("/flush_cache", {}, timeout=30)
    together = await asyncio.gather(*(ask(*request) for request in given))
    again = list(reversed(await asyncio.gather(*(ask(*request) for request in reversed(given)))))
    assert sum(a.cached_tokens for a in again) > 3000
    assert all(map(same, alone, together)) and all(map(same, alone, again))

    # Cut short and asked for the rest, as after an abort: the seed goes with positions, not with requests.
    (ids, params), answer = max(zip(given, alone, strict=True), key=lambda pair: len(pair[1].tokens))
    half = len(answer.tokens) // 2
    rest = await ask(np.concatenate([ids, answer.tokens[:half]]), params)
    assert rest.tokens[: len(answer.tokens) - half].tolist() == answer.tokens[half:].tolist()

    cut = [(ids, replace(params, top_k=20, top_p=0.9)) for ids, params in given[:4]]
    alone = [await ask(*request) for request in cut]
    assert all(map(same, alone, await asyncio.gather(*(ask(*request) for request in cut))))

    # And seeds are heeded: the same prompt, other tokens.
    other = await ask(given[0][0], SamplingParams(max_new_tokens=40, seed=1))
    assert other.tokens.tolist() != (await ask(given[0][0], SamplingParams(max_new_tokens=40, seed=2))).tokens.tolist()
