"""Requests over a network that is slow or breaks: slow is not dead, and each turn counts once."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from rollout_cases import CALL, TASK, LookUp
from test_client import ask, client_for, good

from agentrl.errors import EngineError
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, StopReason
from tests.rollout.fake_engine import FakeEngine, answer
from tests.slow_network import RESET, STALL, VANISH, SlowNetwork


async def test_what_is_slow_is_waited_for() -> None:
    async with FakeEngine(good(10)) as server, SlowNetwork(server.url, delay=0.2, jitter=0.1, stall_s=0.5) as network:
        network.faults = [STALL] * 4
        async with client_for(network) as client:
            answers = await asyncio.gather(*(ask(client, key=f"t-{n}") for n in range(16)))
        assert [a.tokens.tolist() for a in answers] == [[10]] * 16
        assert network.happened == [STALL] * 4
        assert (client.counters.requests, client.counters.retries, len(server.bodies)) == (16, 0, 16)


@pytest.mark.parametrize("fault", [STALL, VANISH, RESET])
async def test_an_answer_that_does_not_come_whole_is_asked_for_again_and_counts_once(fault: str) -> None:
    async with FakeEngine(good(10, 11)) as server, SlowNetwork(server.url, stall_s=60, faults=[fault]) as network:
        async with client_for(network, attempt_timeout=1.0) as client:
            generation = await ask(client)
        assert generation.tokens.tolist() == [10, 11] and network.happened == [fault]
        assert (client.counters.requests, client.counters.output_tokens) == (1, 2) and client.counters.retries
        first, second, *_ = server.bodies
        assert first["rid"] != second["rid"] and first["input_ids"] == second["input_ids"]


@pytest.mark.parametrize("fault", [STALL, VANISH])
async def test_a_connection_that_stalls_ends_by_its_deadline(fault: str) -> None:
    async with FakeEngine(good(10)) as server, SlowNetwork(server.url, stall_s=60, always=fault) as network:
        client = client_for(network, attempt_timeout=0.3)
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="no answer within 1 s"):
                await ask(client, timeout=1.0)
            await client.close()


async def test_a_connection_that_went_dead_while_it_was_idle_is_not_waited_for_twice() -> None:
    async with FakeEngine(good(10)) as server, SlowNetwork(server.url, faults=[None, VANISH]) as network:
        async with client_for(network, attempt_timeout=1.0) as client:
            for _ in range(3):
                assert (await ask(client)).tokens.tolist() == [10]
        assert network.happened == [VANISH] and client.counters.requests == 3


async def test_episodes_over_a_network_that_breaks_are_those_over_one_that_does_not(chat) -> None:
    """None is lost, and no turn is in one twice."""
    oracle = ScriptedClient(lambda text, _: [CALL, CALL, "Ann."][text.count("</tool_response>")], chat)

    async def engine(body):
        ids = np.array(body["input_ids"], np.int32)
        said = await oracle.generate(ids, SamplingParams(), rid="", routing_key="", timeout=60)
        return answer(body, said.tokens.tolist())

    async def played(network: SlowNetwork, **options):
        async with client_for(network, **options) as client:
            runner = EpisodeRunner(LookUp, client, chat, SamplingParams(), EpisodeLimits(max_turns=8), 16)
            groups = await asyncio.gather(*(runner.run_group(TASK, 4, f"g{n}") for n in range(4)))
            await runner.close()
        assert all(t.stop_reason is StopReason.DONE for g in groups for t in g.trajectories)
        return client.counters, {t.trajectory_id: t.segments[0].tokens.tolist() for g in groups for t in g.trajectories}

    async with FakeEngine(engine) as server:
        async with SlowNetwork(server.url) as network:
            counters, expected = await played(network)
        drawn = random.Random(2)
        faults = [drawn.choice([None, None, STALL, VANISH, RESET]) for _ in range(48)]
        async with SlowNetwork(server.url, delay=0.01, jitter=0.01, stall_s=60, faults=faults) as network:
            broken, found = await played(network, attempt_timeout=1.0)
    assert found == expected and len(found) == 16
    assert len(network.happened) > 20
    assert (broken.requests, broken.output_tokens) == (counters.requests, counters.output_tokens)
    assert broken.retries >= len(network.happened)
