"""Episodes against an OpenAI-compatible server: the same assertions as for engines, and what servers differ in."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_openai import FakeOpenAI, call, completion
from rollout_cases import CALL, TASK, TOOLS, LookUp

from agentrl import ToolEnv, tool
from agentrl.errors import ConfigError
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.episode import run_episode
from agentrl.rollout.policies.openai import OpenAIClient, ServerChat, open_server
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.types import Outcome, SamplingParams, StopReason

LIMITS = {"max_turns": 8, "max_context_len": 2000, "request_timeout_s": 5.0}


def play(run, env, server, *, params=None, timeout=20.0, seed=0, **limits):
    """One episode against ``server``; ``(trajectory, client)``."""

    async def episode():
        async with OpenAIClient(server.url, "m", backoff=0.01, max_backoff=0.02) as client:
            trajectory = await run_episode(
                env, TASK, client=client, chat=ServerChat(seed=seed), params=params or SamplingParams(temperature=0.0),
                limits=EpisodeLimits(**{**LIMITS, **limits}), trajectory_id="g0-000", group_id="g0",
            )  # fmt: skip
            return trajectory, client

    return run(episode(), timeout)


def search_call(query="it", call_id="call_abc"):
    return completion("I look.", finish="tool_calls", tool_calls=[call("search", {"query": query}, call_id)])


# -- the contract: both kinds of conversation ---------------------------------------------------------


def scripted(run, chat, env, **limits):
    client = ScriptedClient([CALL, CALL, "Ann."], chat)
    return run(
        run_episode(
            env, TASK, client=client, chat=chat, params=SamplingParams(temperature=0.0),
            limits=EpisodeLimits(**{**LIMITS, **limits}), trajectory_id="g0-000", group_id="g0",
        )
    )  # fmt: skip


def served(run, chat, env, **limits):
    with FakeOpenAI(search_call(call_id="a"), search_call(call_id="b"), completion("Ann.")) as server:
        return play(run, env, server, **limits)[0]


@pytest.mark.parametrize("policy", [scripted, served])
def test_an_episode_is_the_same_record(run, chat, policy):
    env = LookUp()
    trajectory = policy(run, chat, env)
    assert env.actions == [CALL, CALL, "Ann."] and env.reset_with[1]["call_format"] == "hermes"
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.reward, trajectory.success, trajectory.num_turns) == (1.0, True, 3)
    assert trajectory.turn_rewards == [0.0, 0.0, 1.0] and trajectory.rewards == {"match": 1.0}
    assert [c["turn"] for c in trajectory.tool_calls] == [1, 2]
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.messages[1]["content"] == "I look."
    assert trajectory.messages[1]["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "it"}}
    assert set(trajectory.timings) == {"total", "engine", "env", "encode"}
    keys = {"prompt_tokens", "sampled_tokens", "cached_tokens", "finish_reason", "engine_seconds", "env_seconds"}
    assert all(set(turn) == keys for turn in trajectory.info["turns"])
    json.dumps(trajectory.info)


@pytest.mark.parametrize("policy", [scripted, served])
def test_budgets_end_it_with_one_reason(run, chat, policy):
    assert policy(run, chat, LookUp(steps=99), max_turns=2).stop_reason is StopReason.MAX_TURNS
    full = policy(run, chat, LookUp(observation="page " * 2000))
    assert full.stop_reason is StopReason.MAX_CONTEXT and full.num_turns == 1
    assert full.messages[-1]["role"] == "tool"  # what did not fit is in the record
    much = policy(run, chat, LookUp(observation="page " * 40), max_tool_output_tokens=20)
    assert much.stop_reason is StopReason.MAX_TOOL_OUTPUT and much.outcome is Outcome.TRUNCATED

    async def slow(action):
        await asyncio.sleep(5)

    late = policy(run, chat, LookUp(astep=slow), timeout_s=0.3)
    assert late.stop_reason in (StopReason.TIMEOUT, StopReason.ENGINE_TIMEOUT)  # by what the server took of 0.3 s


# -- what goes over the wire ---------------------------------------------------------------------------


def test_results_answer_the_servers_own_calls(run):
    two = completion(None, tool_calls=[call("search", {"query": "a"}, "x1"), call("search", {"query": "b"}, "x2")])

    class Both(LookUp):
        async def astep(self, action):
            transition = await super().astep(action)
            results = [{"role": "tool", "content": f"r{i}", "tool_call_id": f"call_{i}"} for i in (1, 0)]
            return (*transition[:4], {**transition[4], "messages": results}) if not transition[2] else transition

    with FakeOpenAI(two, completion("Ann.")) as server:
        trajectory, _ = play(run, Both(steps=1), server)
        sent = server.bodies[1]["messages"]
    assert trajectory.success and [m["tool_call_id"] for m in sent if m["role"] == "tool"] == ["x2", "x1"]
    assert [m["tool_call_id"] for m in trajectory.messages if m["role"] == "tool"] == ["x2", "x1"]
    assert [c["id"] for c in sent[1]["tool_calls"]] == ["x1", "x2"] and sent[1]["content"] == ""
    assert server.bodies[0]["tools"] == TOOLS


def test_the_request_holds_what_was_asked_for_and_nothing_else(run):
    with FakeOpenAI(completion("Ann.")) as server:
        play(run, LookUp(steps=0), server, max_response_len=77)
        (body,) = server.bodies
    assert body.pop("messages") and body.pop("tools")
    assert body == {"model": "m", "stream": False, "max_tokens": 77, "temperature": 0.0}


def test_each_request_has_a_seed_of_its_own_and_the_same_one_again(run):
    def seeds():
        with FakeOpenAI(search_call(), search_call(), completion("Ann.")) as server:
            play(run, LookUp(), server, params=SamplingParams(temperature=0.7, top_p=0.9, top_k=5), seed=3)
            assert server.bodies[0]["top_p"] == 0.9 and server.bodies[0]["top_k"] == 5
            return [body["seed"] for body in server.bodies]

    first = seeds()
    assert first == seeds() and len(set(first)) == 3 and all(0 <= s < 2**31 for s in first)


def test_reasoning_reaches_the_environment_and_goes_back_as_it_came(run):
    thinking = completion("I look.", reasoning_content="hm", tool_calls=[call("search", {"query": "it"})])
    env = LookUp(steps=1)
    with FakeOpenAI(thinking, completion("Ann.")) as server:
        trajectory, _ = play(run, env, server)
        assert server.bodies[1]["messages"][1]["reasoning_content"] == "hm"
    assert env.actions[0] == "<think>\nhm\n</think>\n\n" + CALL
    assert trajectory.messages[1]["reasoning_content"] == "hm"


def test_calls_that_a_server_left_in_the_text_are_run(run):
    with FakeOpenAI(completion(CALL), completion("Ann.")) as server:
        trajectory, client = play(run, LookUp(steps=1, observation="Ann wrote it"), server)
        sent = server.bodies[1]["messages"]
    assert trajectory.success and sent[1]["tool_calls"][0]["function"]["name"] == "search"
    assert sent[1]["content"] == "I look." and not client.notes


def test_calls_left_in_a_foreign_format_are_noted(run):
    with FakeOpenAI(completion("<tool_call>search\n<arg_key>query</arg_key></tool_call>"), completion("x")) as server:
        _, client = play(run, LookUp(steps=1), server)
    assert "--tool-call-parser" in client.notes[0]


@tool
def echo(text: str) -> str:
    """Says it again.

    Args:
        text: What to say.
    """
    return f"heard {text}"


class Echo(ToolEnv):
    """Repeat the word."""

    tools = [echo]
    tasks = {"train": [("say ok", "ok")] * 5, "test": [("say ok", "ok")]}

    def reward(self, text, answer):
        return float(text.strip() == answer)


@pytest.mark.parametrize(
    "arguments, heard",
    [
        ('{"text": "a</tool_call><think>"}', "heard a</tool_call><think>"),
        ("{bad", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"text": "a", "text": "b"}', "duplicate key"),
        ('{"text": NaN}', "not JSON"),
        ("", "text"),
    ],
)
def test_arguments_arrive_as_they_are_or_teach(run, arguments, heard):
    answers = completion(None, tool_calls=[call("echo", arguments)]), completion("ok")
    with FakeOpenAI(*answers) as server:
        trajectory, _ = play(run, Echo(), server)
        result = server.bodies[1]["messages"][-1]
    assert trajectory.success and result["role"] == "tool" and result["tool_call_id"] == "call_abc"
    assert heard in result["content"]


def test_ids_that_a_server_leaves_out_are_made(run):
    answer = completion(None, tool_calls=[call("echo", {"text": "a"}, None), call("echo", {"text": "b"}, "")])
    with FakeOpenAI(answer, answer, completion("ok")) as server:
        trajectory, _ = play(run, Echo(), server)
        ids = [m["tool_call_id"] for m in server.bodies[2]["messages"] if m["role"] == "tool"]
    assert trajectory.success and len(set(ids)) == 4


def test_a_malformed_call_in_the_text_gets_its_lesson_as_a_user_message(run):
    with FakeOpenAI(completion("<tool_call>{oops</tool_call>"), completion("ok")) as server:
        trajectory, _ = play(run, Echo(), server)
        assert [m["role"] for m in server.bodies[1]["messages"]] == ["user", "assistant", "user"]
        assert "not valid JSON" in server.bodies[1]["messages"][-1]["content"]
    assert trajectory.success


def test_an_environment_that_answers_calls_with_words_of_its_own(run):
    with FakeOpenAI(search_call(), completion("Ann.")) as server:
        trajectory, _ = play(run, LookUp(steps=1, role="user"), server)
        assert "tool_calls" not in server.bodies[1]["messages"][1]
    assert trajectory.success


def test_lone_surrogates_do_not_break_the_request(run):
    with FakeOpenAI(search_call("\ud800"), completion("Ann.")) as server:
        trajectory, _ = play(run, LookUp(steps=1, observation="a\udfffb"), server)
    assert trajectory.success


# -- tag formats ------------------------------------------------------------------------------------------


class Tags(Echo):
    call_format = "tags:echo,answer"


@pytest.mark.parametrize(
    "first, choice",
    [
        ("<echo>hi", {"matched_stop": "</echo>"}),  # SGLang
        ("<echo>hi", {"stop_reason": "</echo>"}),  # vLLM
        ("<echo>hi", {}),  # OpenAI
        ("<echo>hi</echo> and more <answer>no</answer>", {}),  # a server that knows no stop strings
    ],
)
def test_the_tag_that_ended_a_turn_is_there(run, first, choice):
    with FakeOpenAI(completion(first, choice=choice), completion("So <answer>ok")) as server:
        trajectory, _ = play(run, Tags(), server)
        assert server.bodies[0]["stop"] == ["</echo>", "</answer>"] and "tools" not in server.bodies[0]
        assert server.bodies[1]["messages"][1]["content"] == "<echo>hi</echo>"
    assert trajectory.success and trajectory.messages[1]["content"] == "<echo>hi</echo>"
    assert "heard hi" in trajectory.messages[2]["content"]


def test_a_tag_that_the_model_left_open_stays_open_where_that_is_known(run):
    answers = completion("<echo>hi", choice={"matched_stop": 151645}), completion("<answer>ok")
    with FakeOpenAI(*answers) as server:
        trajectory, _ = play(run, Tags(), server)
    assert trajectory.messages[1]["content"] == "<echo>hi" and "not closed" in trajectory.messages[2]["content"]


def test_a_turn_that_was_cut_short_is_not_closed(run):
    with FakeOpenAI(completion("<echo>hi", finish="length")) as server:
        trajectory, _ = play(run, Tags(), server)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS and trajectory.messages[-1]["content"] == "<echo>hi"


def test_inline_observations_and_raw_prompts_end_the_evaluation(run):
    with FakeOpenAI(completion("x")) as server:
        with pytest.raises(ConfigError, match="'inline'.*--hf-checkpoint"):
            play(run, LookUp(role="inline"), server)

        class Raw(LookUp):
            async def areset(self, **kwargs):
                observation, info = await super().areset(**kwargs)
                return observation, {**info, "raw_prompt": "2 + 2 ="}

        with pytest.raises(ConfigError, match="--no-apply-chat-template"):
            play(run, Raw(), server)


# -- budgets ---------------------------------------------------------------------------------------------


def test_counts_are_the_servers(run):
    answers = [{**search_call(), "usage": {"prompt_tokens": 100, "completion_tokens": 20}}, completion("Ann.")]
    with FakeOpenAI(*answers) as server:
        trajectory, client = play(run, LookUp(steps=1), server, max_context_len=150, max_response_len=64)
        assert [body["max_tokens"] for body in server.bodies] == [64, 150 - 120 - 1]
    assert [turn["sampled_tokens"] for turn in trajectory.info["turns"]] == [20, 3]
    assert client.metrics()["prompt_tokens"] == 110 and client.metrics()["requests"] == 2


def test_without_usage_counts_are_estimated(run):
    with FakeOpenAI(completion("word " * 80, usage=None)) as server:
        trajectory, _ = play(run, LookUp(steps=0), server)
    assert trajectory.info["turns"][0]["sampled_tokens"] == 100


def test_a_first_prompt_that_does_not_fit_is_nobodys_fault(run):
    with FakeOpenAI(completion("x", usage=(5000, 1))) as server:
        trajectory, _ = play(run, LookUp(), server)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "5000 tokens" in trajectory.error
    assert trajectory.info["retryable"] is False


# -- open_server ------------------------------------------------------------------------------------------


def config(server, **changes):
    values = {"base_url": server.url, "model": None, "api_key_env": "TEST_KEY", "seed": 1, "rollout_concurrency": 4}
    return SimpleNamespace(**{**values, "engine_timeout": 5.0, "apply_chat_template_kwargs": "", **changes})


def opened(run, cfg):
    async def go():
        async with open_server(cfg) as (client, chat):
            return client, chat

    return run(go())


def test_the_only_model_is_taken(run, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "sk-1")
    with FakeOpenAI(completion("x"), key="sk-1", models=["alone"]) as server:
        client, chat = opened(run, config(server))
        assert client.model == "alone" and chat.seed == 1 and chat.call_format == "hermes"
        client, _ = opened(run, config(server, model="other"))
        assert client.model == "other" and "it lists alone" in client.notes[0]


@pytest.mark.parametrize("models, text", [(["a", "b"], "it lists a, b"), (404, "does not say")])
def test_a_model_must_be_named_where_there_is_a_choice(run, models, text):
    with FakeOpenAI(completion("x"), models=models) as server, pytest.raises(ConfigError, match=f"--model.*{text}"):
        opened(run, config(server))


def test_a_server_without_a_list_is_fine(run):
    for status in (403, 404, 500):
        with FakeOpenAI(completion("x"), models=status) as server:
            assert opened(run, config(server, model="m"))[0].notes == []


def test_a_family_format_is_refused_with_the_reason():
    parser = SimpleNamespace(structured=True, name="glm")
    with pytest.raises(ConfigError, match="call_format at 'auto'"):
        ServerChat().conversation(
            client=None, parser=parser, params=SamplingParams(), limits=EpisodeLimits(), routing_key="", name=""
        )


def test_nothing_heavy_is_imported():
    code = (
        "import sys; import agentrl.rollout.policies.openai, agentrl.rollout.episode, agentrl.rollout.worker\n"
        "heavy = {'torch', 'ray', 'sglang', 'megatron', 'transformers', 'tokenizers', 'aiohttp', 'orjson', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


LIGHT = """
import sys
sys.path.insert(0, {here!r})
HEAVY = {{"torch", "ray", "sglang", "sglang_router", "megatron", "transformers", "tokenizers", "aiohttp", "orjson",
          "pyarrow", "pandas", "scipy", "uvicorn", "starlette"}}
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotInstalled())
from fake_openai import FakeOpenAI, call, completion
from agentrl.cli.main import main
script = [completion(None, tool_calls=[call("search", {{"query": "x"}})]), completion("Answer: y")]
with FakeOpenAI(*script, key="sk-light") as server:
    words = ["--env", "search", "--limit", "3", "--base-url", server.url, "--api-key-env", "LIGHT_KEY"]
    assert main(["eval", *words, "--output-dir", "run"]) == 0
assert main(["show", "run"]) == 0 and main(["compare", "run", "run"]) == 0
"""


def test_a_light_install_evaluates_shows_and_compares(tmp_path):
    here = str(Path(__file__).parent)
    env = {**os.environ, "LIGHT_KEY": "sk-light", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(here=here)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "3 of 3 episodes." in done.stdout and "success: the same in every task" in done.stdout
    written = "".join(f.read_text() for f in (tmp_path / "run").rglob("*") if f.is_file())
    assert "sk-light" not in written + done.stdout + done.stderr and "LIGHT_KEY" in written
