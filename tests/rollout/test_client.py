import asyncio
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeEngine, answer

from agentrl.errors import ConfigError, EngineError
from agentrl.rollout.policies.sglang import EngineClient
from agentrl.rollout.sampling import check_sampling, greedy
from agentrl.types import SamplingParams

PROMPT = np.array([5, 6, 7], np.int32)


def good(*tokens, **kwargs):
    return lambda body: answer(body, list(tokens), **kwargs)


def client_for(server, **kwargs):
    return EngineClient(server.url, server.key, **{"backoff": 0.01, "max_backoff": 0.05, **kwargs})


async def ask(client, timeout=5.0, key="t-0", **params):
    return await client.generate(
        PROMPT, SamplingParams(**params), rid=uuid.uuid4().hex, routing_key=key, timeout=timeout
    )


def play(run, *script, timeout=5.0, key=None, params=None, **kwargs):
    """One request against a server with this script: (server, client, generation)."""

    async def go():
        async with FakeEngine(*script, key=key) as server, client_for(server, **kwargs) as client:
            return server, client, await ask(client, timeout, **(params or {}))

    return run(go())


def test_request_and_answer(run):
    params = {"stop": ("</a>",), "seed": 2**62}
    server, client, generation = play(run, good(10, 11, version="3"), key="secret", params=params)
    (body,), (headers,) = server.bodies, server.headers
    assert body["input_ids"] == [5, 6, 7]
    assert body["return_logprob"] is True
    assert "logprob_start_len" not in body
    assert len(body["rid"]) == 32
    sampling = body["sampling_params"]
    assert sampling["stop"] == ["</a>"] and sampling["no_stop_trim"] and not sampling["skip_special_tokens"]
    assert sampling["sampling_seed"] == 2**62
    assert headers["X-SMG-Routing-Key"] == "t-0"
    assert generation.tokens.tolist() == [10, 11] and generation.tokens.dtype == np.int32
    assert generation.logprobs.tolist() == [-0.5, -0.5] and generation.logprobs.dtype == np.float32
    assert generation.versions.tolist() == [3, 3]
    assert generation.prompt_tokens == 3
    assert client.metrics()["requests"] == 1 and client.metrics()["output_tokens"] == 2


def test_version_spans(run):
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    *_, generation = play(run, good(1, 2, 3, version="2", weight_versions=spans))
    assert generation.versions.tolist() == [0, 2, 2]


@pytest.mark.parametrize("trouble", [500, 502, 503, 429, 408, "drop", "torn", "known"])
def test_transient_trouble_is_retried_elsewhere(run, trouble):
    server, client, generation = play(run, trouble, trouble, good(10))
    assert generation.tokens.tolist() == [10]
    assert client.counters.retries == 2
    assert len({body["rid"] for body in server.bodies}) == 3  # an engine refuses a request id it knows
    assert [h["X-SMG-Routing-Key"] for h in server.headers] == ["t-0", "t-0~1", "t-0~2"]


def test_a_moved_trajectory_stays_where_it_went(run):
    async def go():
        async with FakeEngine(500, good(10)) as server, client_for(server) as client:
            await ask(client)
            await ask(client)
            await ask(client, key="other")
            return [h["X-SMG-Routing-Key"] for h in server.headers]

    assert run(go()) == ["t-0", "t-0~1", "t-0~1", "other"]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_final_and_says_why(run, status):
    async def go():
        async with FakeEngine(status) as server, client_for(server) as client:
            with pytest.raises(EngineError, match=f"HTTP {status}.*on purpose"):
                await ask(client)
            assert len(server.bodies) == 1
            assert client.counters.failures == 1

    run(go())


def test_wrong_key(run):
    async def go():
        async with FakeEngine(good(1), key="right") as server, EngineClient(server.url, "wrong") as client:
            with pytest.raises(EngineError, match="401"):
                await ask(client)

    run(go())


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (good(1, 2, output_token_logprobs=[[-0.1, 1, None], [None, 2, None]]), "null"),
        (good(1, 2, output_token_logprobs=[[-0.1, 1, None]]), "do not match"),
        (good(1, 2, output_token_logprobs=[[-0.1, 1, None], [-0.1, 9, None]]), "do not match"),
        (lambda body: {"error": "odd"}, "unexpected answer"),
        (good(1, version="abc"), "unexpected answer"),
        (good(1, 2, weight_versions=[{"version": "1", "start": 0, "end": 1}]), "unexpected answer"),
        (good(*range(9)), "9 tokens came back, 4 were asked for"),
        (good(finish_reason={"type": "abort", "status_code": 400, "message": "too long"}), "too long"),
    ],
)
def test_an_unusable_answer_is_an_error(run, broken, text):
    with pytest.raises(EngineError, match=text):
        play(run, broken, params={"max_new_tokens": 4})


def test_an_aborted_answer_goes_on_from_its_tokens(run):
    server, client, generation = play(
        run,
        good(10, 11, finish="abort", version="1"),
        good(finish="abort", version="1"),
        good(12, version="2"),
        params={"max_new_tokens": 4},
    )
    assert generation.tokens.tolist() == [10, 11, 12]
    assert generation.versions.tolist() == [1, 1, 2]
    assert generation.finish_reason == "stop"
    assert generation.prompt_tokens == 3
    assert [b["input_ids"] for b in server.bodies] == [[5, 6, 7], [5, 6, 7, 10, 11], [5, 6, 7, 10, 11]]
    assert [b["sampling_params"]["max_new_tokens"] for b in server.bodies] == [4, 2, 2]
    assert client.counters.continuations == 2


def test_an_abort_that_used_the_whole_budget_is_a_length_stop(run):
    *_, generation = play(run, good(10, 11, finish="abort"), params={"max_new_tokens": 2})
    assert generation.finish_reason == "length"


def test_a_server_that_only_aborts_meets_the_deadline(run):
    with pytest.raises(EngineError, match="no answer within 0.3 s"):
        play(run, good(finish="abort"), timeout=0.3)


def test_a_hanging_engine_meets_the_deadline(run):
    with pytest.raises(EngineError, match="no answer within"):
        play(run, "hang", timeout=0.4)


def test_a_hanging_attempt_is_sent_again(run):
    server, _, generation = play(run, "hang", good(10), attempt_timeout=0.2)
    assert generation.tokens.tolist() == [10]
    assert [h["X-SMG-Routing-Key"] for h in server.headers[:2]] == ["t-0", "t-0~1"]


def test_a_killed_engine_that_comes_back_costs_time_only(run):
    async def go():
        async with FakeEngine("hang", good(10)) as server, client_for(server) as client:
            request = asyncio.create_task(ask(client, 10))
            while not server.bodies:
                await asyncio.sleep(0.01)
            await server.stop()  # the request in flight is cut
            while client.counters.retries < 2:  # refused connections meanwhile
                await asyncio.sleep(0.01)
            assert not request.done()
            await server.start()
            return await request, client.counters.retries

    generation, retries = run(go())
    assert generation.tokens.tolist() == [10]
    assert retries >= 2


def test_no_server_at_all(run):
    async def go():
        async with FakeEngine(good(1)) as server:
            pass
        async with client_for(server) as client:
            with pytest.raises(EngineError, match="ConnectionRefusedError"):
                await ask(client, 0.3)

    run(go())


def test_cancelling_frees_the_connection(run):
    async def go():
        async with FakeEngine("hang", good(1)) as server, client_for(server) as client:
            request = asyncio.create_task(ask(client))
            while not server.in_flight:
                await asyncio.sleep(0.01)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert (await ask(client)).tokens.tolist() == [1]

    run(go())


def test_address_must_be_one():
    with pytest.raises(ConfigError, match="http://"):
        EngineClient("localhost:30000")


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"max_new_tokens": 0}])
def test_sampling_parameters_are_checked(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        check_sampling(SamplingParams(**bad))


def test_greedy():
    assert greedy(SamplingParams(temperature=0.7, top_p=0.5, top_k=3, max_new_tokens=9)) == SamplingParams(
        temperature=0.0, max_new_tokens=9
    )


def test_time_with_several_requests_in_flight_is_busy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("agentrl.rollout.policies.sglang.time", SimpleNamespace(monotonic=lambda: now[0]))
    client = EngineClient("http://127.0.0.1:1")
    for seconds, more in ((3.0, 1), (2.0, 1), (2.0, -1), (1.0, -1), (9.0, 1)):
        now[0] += seconds
        client._count_busy(more)
    now[0] += 0.5
    assert client.metrics()["busy_seconds"] == 5.5
