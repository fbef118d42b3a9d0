"""A chat server that refuses, fails, hangs or talks nonsense."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from fake_openai import FakeOpenAI, completion, refused
from rollout_cases import TASK, LookUp

from agentrl.chat_api.refusals import ContextOverflow
from agentrl.errors import ConfigError, EngineError
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.policies.openai import OpenAIClient, ServerChat
from agentrl.rollout.worker import EpisodeRunner
from agentrl.types import SamplingParams, StopReason

PARAMS = SamplingParams(temperature=0.5, top_p=0.9, top_k=4, stop=("</a>",), max_new_tokens=8)
MESSAGES = [{"role": "user", "content": "hi"}]


def ask(run, server, *, params=PARAMS, timeout=3.0, seed=7, tools=None, times=1, messages=MESSAGES, **kwargs):
    """``(last reply, client)``."""

    async def go():
        async with OpenAIClient(server.url, "m", backoff=0.01, max_backoff=0.02, **kwargs) as client:
            for _ in range(times):
                reply = await client.complete(messages, params, tools=tools, seed=seed, timeout=timeout)
            return reply, client

    return run(go())


@pytest.mark.parametrize(
    "trouble",
    [refused(429, "slow down"), refused(500, "oops"), refused(503, "loading"), refused(408, "late"), "drop",
     b"<html>", b'{"choices": [', b'{"choices": []}', {"error": {"message": "upstream", "code": 502}},
     completion("x", finish="abort")],
)  # fmt: skip
def test_trouble_is_tried_again(run, trouble):
    with FakeOpenAI(trouble, trouble, completion("yes")) as server:
        reply, client = ask(run, server)
    assert reply.content == "yes" and client.counters.retries == 2


@pytest.mark.parametrize("wait", ["0.3", "date"])
def test_retry_after_is_honoured(run, wait):
    if wait == "date":  # whole seconds: between 1 and 2 from now
        wait = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    with FakeOpenAI(refused(429, "slow", {"Retry-After": wait}), completion("yes")) as server:
        started = time.monotonic()
        assert ask(run, server, timeout=10.0)[0].content == "yes"
        assert time.monotonic() - started > 0.25


@pytest.mark.parametrize(
    "trouble, text",
    [(refused(500, "oops"), "HTTP 500: oops"), ("hang", "no whole answer"), ("drop", "last:"),
     (refused(429, "slow", {"Retry-After": "3600"}), "HTTP 429: slow")],
)  # fmt: skip
def test_at_the_deadline_it_is_an_engine_error(run, trouble, text):
    with FakeOpenAI(trouble) as server, pytest.raises(EngineError, match=text) as caught:
        ask(run, server, timeout=0.5)
    assert "--engine-timeout" in str(caught.value)


def test_a_server_that_answers_or_is_slow_is_not_gone(run):
    async def go(url):
        async with OpenAIClient(url, "m", backoff=0.01) as client:
            for _ in range(2):
                with pytest.raises(EngineError):
                    await client.complete(MESSAGES, PARAMS, timeout=0.3)
                assert client.broken() is None

    for trouble in ("hang", refused(500, "oops")):
        with FakeOpenAI(trouble) as server:
            run(go(server.url))


def test_nonsense_is_given_up_soon(run):
    with FakeOpenAI(b"<html>wrong door</html>") as server, pytest.raises(EngineError, match="not JSON.*wrong door"):
        ask(run, server, timeout=600.0)
    assert len(server.bodies) == 3


def test_nobody_listens(run):
    with FakeOpenAI(completion("x")) as server:
        url = server.url

    async def go():
        async with OpenAIClient(url, "m", backoff=0.01) as client:
            with pytest.raises(EngineError, match="ConnectError"):
                await client.complete(MESSAGES, PARAMS, timeout=2.0)
            assert "no server answers at" in client.broken()
            with pytest.raises(EngineError, match="no server answers at .*--base-url"):
                await client.choose_model("m", timeout=2.0)

    run(go())


@pytest.mark.parametrize(
    "answer, text",
    [
        (refused(401, "bad key sk-secret"), "TEST_KEY, which is set"),
        (refused(403, "forbidden"), "HTTP 403: forbidden"),
        (refused(402, "pay"), "HTTP 402"),
        (refused(404, "model 'm' not found"), r"--base-url .*--model \(now 'm'\)"),
        ((302, {}, {"Location": "https://elsewhere"}), "HTTP 302"),
        (refused(429, "You exceeded your current quota", code="insufficient_quota"), "account's quota"),
        (refused(400, "registry/m does not support tools"), "tool-call parser"),
        (refused(400, '"auto" tool choice requires --enable-auto-tool-choice'), "tool-call parser"),
    ],
)
def test_what_no_retry_mends_ends_the_evaluation(run, answer, text):
    with FakeOpenAI(answer) as server:
        with pytest.raises(ConfigError, match=text) as caught:
            ask(run, server, api_key="sk-secret", api_key_env="TEST_KEY", tools=[{"type": "function"}])
        assert len(server.bodies) == 1
    assert "sk-secret" not in str(caught.value)


def test_a_whole_evaluation_ends_at_the_first_wrong_key(run):
    async def go(url):
        async with OpenAIClient(url, "m") as client:
            limits = EpisodeLimits(max_turns=2)
            runner = EpisodeRunner(LookUp, client, ServerChat(), SamplingParams(), limits, 4)
            try:
                await runner.run_group(TASK, 20, "g0")
            finally:
                await runner.close()

    with FakeOpenAI(completion("x"), key="other") as server:
        with pytest.raises(ConfigError, match="HTTP 401"):
            run(go(server.url))
        assert len(server.headers) <= 20 and not server.bodies


def test_one_refused_request_ends_its_episode_only(run):
    def picky(body):
        return refused(400, "content policy") if "bad" in body["messages"][0]["content"] else completion("ok")

    async def go(url):
        async with OpenAIClient(url, "m") as client:
            await client.complete(MESSAGES, PARAMS, timeout=3)
            for _ in range(5):
                with pytest.raises(EngineError, match="HTTP 400: content policy"):
                    await client.complete([{"role": "user", "content": "bad"}], PARAMS, timeout=3)

    with FakeOpenAI(picky) as server:
        run(go(server.url))


def test_a_server_that_refuses_everything_ends_the_evaluation(run):
    async def go(url):
        async with OpenAIClient(url, "m") as client:
            for _ in range(2):
                with pytest.raises(EngineError):
                    await client.complete(MESSAGES, PARAMS, timeout=3)
            with pytest.raises(ConfigError, match="refuses every request.*HTTP 422: no"):
                await client.complete(MESSAGES, PARAMS, timeout=3)

    with FakeOpenAI(refused(422, "no")) as server:
        run(go(server.url))


# -- fields that a server does not take -----------------------------------------------------------------


def without(field, message, **error):
    return lambda body: refused(400, message, **error) if field in body else completion("yes")


@pytest.mark.parametrize(
    "field, message, error",
    [
        ("temperature", "Unsupported value: 'temperature' does not support 0.5 with this model.",
         {"param": "temperature", "code": "unsupported_value"}),
        ("top_k", "Unknown argument provided: 'top_k'", {}),
        ("seed", "body.seed: Extra inputs are not permitted", {}),
        ("stop", "'stop' is not supported with this model", {"param": "stop"}),
        ("top_p", "Unrecognized request argument supplied: top_p", {}),
    ],
)  # fmt: skip
def test_an_optional_field_is_left_out_once_and_noted(run, field, message, error):
    with FakeOpenAI(without(field, message, **error)) as server:
        reply, client = ask(run, server, times=3)
        assert [field in body for body in server.bodies] == [True, False, False, False]
    assert reply.content == "yes" and len(client.notes) == 1 and repr(field) in client.notes[0]


def test_a_value_out_of_range_is_not_left_out(run):
    answer = without("temperature", "temperature must be between 0 and 2")
    with FakeOpenAI(answer) as server, pytest.raises(EngineError, match="between 0 and 2"):
        ask(run, server)


def test_max_tokens_goes_by_its_new_name(run):
    text = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    with FakeOpenAI(without("max_tokens", text, param="max_tokens")) as server:
        _, client = ask(run, server, times=2)
        assert [body.get("max_completion_tokens") for body in server.bodies] == [None, 8, 8]
    assert not client.notes


def test_reasoning_is_left_out_of_the_history(run):
    def picky(body):
        if any("reasoning_content" in m for m in body["messages"]):
            return refused(422, "messages.1.reasoning_content: Extra inputs are not permitted")
        return completion("yes")

    history = [*MESSAGES, {"role": "assistant", "content": "a", "reasoning_content": "r"}, *MESSAGES]
    with FakeOpenAI(picky) as server:
        reply, client = ask(run, server, messages=history)
    assert reply.content == "yes" and len(client.notes) == 1


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 2100 tokens (1800 in the messages)",
        "The input (2100 tokens) is longer than the model's context length (2048 tokens).",
        "the request exceeds the available context size, try increasing it",
        "max_tokens must be at least 1, got -23.",
    ],
)
def test_an_overflow_is_told_apart(run, message):
    with FakeOpenAI(refused(400, message)) as server, pytest.raises(ContextOverflow):
        ask(run, server)


@pytest.mark.parametrize("turns, reason", [(0, StopReason.ENV_ERROR), (1, StopReason.MAX_CONTEXT)])
def test_an_overflow_ends_the_episode(run, turns, reason):
    async def go(url):
        async with OpenAIClient(url, "m") as client:
            runner = EpisodeRunner(
                lambda: LookUp(role="user"), client, ServerChat(), SamplingParams(), EpisodeLimits(max_turns=5), 1
            )
            try:
                return (await runner.run_group(TASK, 1, "g0")).trajectories[0]
            finally:
                await runner.close()

    with FakeOpenAI(*[completion("x")] * turns, refused(400, "maximum context length is 10 tokens")) as server:
        trajectory = run(go(server.url))
    assert trajectory.stop_reason is reason and trajectory.num_turns == turns


# -- what never happens ----------------------------------------------------------------------------------


def test_the_key_is_in_no_message_and_no_note(run, caplog):
    secret = "sk-very-secret"
    script = [refused(500, f"Bearer {secret}"), refused(400, f"'top_k' is not supported {secret}"), completion("x")]
    with FakeOpenAI(*script, key=secret) as server:
        _, client = ask(run, server, api_key=secret)
        assert server.headers[0]["Authorization"] == f"Bearer {secret}"
    with FakeOpenAI(refused(500, secret)) as server, pytest.raises(EngineError) as caught:
        ask(run, server, api_key=secret, timeout=0.2)
    seen = [str(caught.value), repr(caught.value), caplog.text, *client.notes, repr(vars(client))]
    assert not any(secret in text for text in seen)


def test_a_key_that_travels_in_the_open_is_noted():
    assert "MY_KEY" in OpenAIClient("http://gpu-box:8000/v1", api_key="k", api_key_env="MY_KEY").notes[0]
    for url, key in (("http://gpu-box/v1", None), ("https://gpu-box/v1", "k"), ("http://127.0.0.1:1/v1", "k")):
        assert OpenAIClient(url, api_key=key).notes == []


@pytest.mark.parametrize("key", ["two words", "käse", "line\nbreak"])
def test_a_key_that_cannot_be_one_is_refused_unseen(key):
    with pytest.raises(ConfigError, match="MY_KEY") as caught:
        OpenAIClient("http://127.0.0.1:1/v1", api_key=key, api_key_env="MY_KEY")
    assert key not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://me:pw@host/v1", "http://h?k=pw"])
def test_an_address_that_cannot_be_one_is_refused(url):
    with pytest.raises(ConfigError, match="--base-url") as caught:
        OpenAIClient(url)
    assert "pw" not in str(caught.value)


def test_a_pasted_endpoint_and_a_slash_do_no_harm():
    for url in ("http://h/v1/", "http://h/v1", "http://h/v1/chat/completions/"):
        assert OpenAIClient(url).base_url == "http://h/v1"


def test_no_more_requests_at_once_than_asked_for(run):
    async def go(url):
        async with OpenAIClient(url, "m", max_concurrency=1) as client:
            waiting = client.complete(MESSAGES, PARAMS, timeout=10.0)
            with pytest.raises(EngineError, match="no free slot"):
                await asyncio.gather(waiting, client.complete(MESSAGES, PARAMS, timeout=0.2))

    with FakeOpenAI("hang") as server:
        run(go(server.url))
