"""What every policy client keeps: the same assertions for the scripted one, an HTTP fake and a real engine."""

import asyncio
import os
import random
import signal
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeEngine, answer
from rollout_cases import CALL, TASK, LookUp

from agentrl.errors import EngineError
from agentrl.rollout.episode import EpisodeLimits, run_episode
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.types import Outcome, SamplingParams

CONTEXT = 512
ENGINE_MARGIN = 8  # SGLang keeps a few tokens of --context-length to itself


@pytest.fixture(scope="module")
def engine(hf_tokenizer, tmp_path_factory):
    """A real SGLang server with a random model over this folder's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentrl.engines.engine import EngineProcess, EngineSpec

    path: Path = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(hf_tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT + ENGINE_MARGIN,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    hf_tokenizer.save_pretrained(path)
    spec = EngineSpec(str(path), max_total_tokens=4096, context_length=CONTEXT + ENGINE_MARGIN)
    engine = EngineProcess(spec, log_dir=path)
    engine.start()
    yield engine
    engine.stop()


def small_model(body):
    """Random ids until a stop or the budget, as an engine would."""
    rng = random.Random(len(body["input_ids"]))
    sampling = body["sampling_params"]
    stops = {2, *sampling.get("stop_token_ids", [])}
    tokens = []
    while len(tokens) < sampling["max_new_tokens"] and not (tokens and tokens[-1] in stops):
        tokens.append(rng.randrange(3, 400))
    return answer(body, tokens, finish="stop" if tokens[-1] in stops else "length")


@pytest.fixture(params=["scripted", "http", pytest.param("engine", marks=pytest.mark.slow)])
def opened(request, chat):
    """Gives ``async with opened() as client``."""
    real = request.getfixturevalue("engine") if request.param == "engine" else None

    @asynccontextmanager
    async def opener():
        if request.param == "scripted":
            yield ScriptedClient([CALL * 5], chat)
        elif real is not None:
            async with EngineClient(real.url, real.api_key) as client:
                yield client
        else:
            async with FakeEngine(small_model, key="k") as server, EngineClient(server.url, "k") as client:
                yield client

    return opener


async def ask(client, ids, **params):
    return await client.generate(
        np.array(ids, np.int32), SamplingParams(**params), rid=uuid.uuid4().hex, routing_key="t-0", timeout=60
    )


def check(generation, prompt, budget):
    n = len(generation.tokens)
    assert 1 <= n <= budget
    assert generation.tokens.dtype == np.int32 and generation.versions.dtype == np.int32
    assert generation.logprobs.dtype == np.float32
    assert len(generation.logprobs) == len(generation.versions) == n
    assert np.isfinite(generation.logprobs).all() and (generation.logprobs <= 1e-3).all()
    assert (generation.versions == 0).all()
    assert generation.prompt_tokens == prompt
    assert generation.finish_reason in ("stop", "length")
    assert n == budget or generation.finish_reason == "stop"


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_arrays_and_budget(run, opened, budget):
    async def go():
        async with opened() as client:
            return await ask(client, range(10, 40), max_new_tokens=budget)

    check(run(go(), 90), 30, budget)


def test_a_stop_token_ends_the_turn_and_is_kept(run, opened):
    async def go():
        async with opened() as client:
            free = await ask(client, range(10, 40), max_new_tokens=30, temperature=0.0)
            stop = int(free.tokens[len(free.tokens) // 2])
            again = await ask(client, range(10, 40), max_new_tokens=30, temperature=0.0, stop_token_ids=(stop,))
            return stop, again

    stop, generation = run(go(), 90)
    assert generation.finish_reason == "stop"
    assert generation.tokens[-1] == stop and stop not in generation.tokens[:-1]


def test_many_at_once(run, opened):
    async def go():
        async with opened() as client:
            return await asyncio.gather(*(ask(client, range(3, 20 + i), max_new_tokens=12) for i in range(16)))

    for i, generation in enumerate(run(go(), 90)):
        check(generation, 17 + i, 12)


def test_an_episode(run, opened, chat):
    async def go():
        async with opened() as client:
            return await run_episode(
                LookUp(steps=2), TASK, client=client, chat=chat, params=SamplingParams(),
                limits=EpisodeLimits(max_response_len=24, max_context_len=CONTEXT, max_turns=3),
                trajectory_id="g0-000", group_id="g0",
            )  # fmt: skip

    trajectory = run(go(), 90)
    assert trajectory.outcome is not Outcome.INFRA_ERROR, trajectory.error
    assert trajectory.num_sampled == sum(t["sampled_tokens"] for t in trajectory.info["turns"])


# -- the real engine alone ---------------------------------------------------------------------------


def with_engine(run, engine, ids, **params):
    async def go():
        async with EngineClient(engine.url, engine.api_key) as client:
            return await ask(client, ids, **params)

    return run(go(), 90)


@pytest.mark.slow
def test_stop_strings_stay_in_the_ids(run, engine, chat):
    generation = with_engine(run, engine, range(10, 40), max_new_tokens=300, stop=("e",), stop_token_ids=(2,))
    text = chat.decode(generation.tokens)
    assert generation.finish_reason == "stop"
    assert "e" in text and "e" not in chat.decode(generation.tokens[:-1])


@pytest.mark.slow
def test_a_context_filled_to_the_last_token(run, engine):
    """The loop asks for all the room there is: the engine must give it."""
    for prompt in (CONTEXT - 20, CONTEXT - 1):
        generation = with_engine(run, engine, [5] * prompt, max_new_tokens=CONTEXT - prompt, temperature=1.0)
        assert len(generation.tokens) == CONTEXT - prompt or generation.finish_reason == "stop", prompt


@pytest.mark.slow
def test_a_refusal_of_the_engine_is_told(run, engine):
    with pytest.raises(EngineError, match="HTTP 400"):
        with_engine(run, engine, [5] * (CONTEXT + 10), max_new_tokens=5)


@pytest.mark.slow
def test_an_engine_killed_while_it_generates_costs_time_only(run, engine):
    """Last in this file: the engine is another one afterwards, at the same address."""
    from agentrl.engines.engine import EngineProcess
    from agentrl.processes.server import port_is_free

    async def go():
        async with EngineClient(engine.url, engine.api_key) as client:
            for seconds in (0.3, 0.1, 0.03, 0.01):  # a random model may end early, a fast machine in no time
                request = asyncio.create_task(ask_for(client, 300.0))
                await asyncio.sleep(seconds)
                if not request.done():
                    break
            tree = engine.tree()
            for process in tree:  # stopped all at once, so that none answers while the others are killed
                os.kill(process.pid, signal.SIGSTOP)
            for process in tree:
                os.kill(process.pid, signal.SIGKILL)
            for _ in range(100):  # the kernel closes their sockets
                if port_is_free("127.0.0.1", engine.port):
                    break
                await asyncio.sleep(0.1)
            assert not request.done()
            again = EngineProcess(engine.spec, log_dir=None, port=engine.port, api_key=engine.api_key)
            try:
                await asyncio.to_thread(again.start)
                return await request, client.counters.retries
            finally:
                await asyncio.to_thread(again.stop)

    async def ask_for(client, timeout):
        return await client.generate(
            np.arange(10, 40, dtype=np.int32), SamplingParams(max_new_tokens=450, top_k=5),
            rid=uuid.uuid4().hex, routing_key="t-0", timeout=timeout,
        )  # fmt: skip

    generation, retries = run(go(), 300)
    assert retries >= 1
    check(generation, 30, 450)
