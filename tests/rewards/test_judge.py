"""Judges over HTTP: what they are asked, how a score is read, and what trouble of the server becomes."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from judge_server import JudgeServer, completion, scripted, together, when
from yardstick import within

import agentrl
from agentrl.errors import ConfigError, EnvError, InfraError
from agentrl.rewards import Judge, RewardSet, load, verdicts
from agentrl.rewards.reply_cache import ReplyCache

ROOT = Path(__file__).parents[2]
ROW = {"prompt": "What is 2 + 2?", "level": 3}


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def ask(judge, texts, row=ROW):
    try:
        return await asyncio.gather(*(judge(text, "4", row=row) for text in texts), return_exceptions=True)
    finally:
        await judge.aclose()


def judged(judge, *texts, row=ROW):
    return asyncio.run(ask(judge, texts, row))


# -- what is asked ---------------------------------------------------------------------------------


def test_the_request_and_the_score():
    with JudgeServer(scripted("Right. Score: 7")) as server:
        judge = Judge(server.url, "grader", temperature=0.2, max_tokens=99)
        assert judged(judge, "four") == [0.7]
    (request,) = server.requests
    assert (request["path"], request["model"], request["temperature"]) == ("/v1/chat/completions", "grader", 0.2)
    assert request["max_tokens"] == 99 and server.keys == [None]
    system, user = request["messages"]
    assert system == {"role": "system", "content": verdicts.SYSTEM_PROMPT}
    assert "Question:\nWhat is 2 + 2?" in user["content"] and "Reference answer:\n4" in user["content"]
    assert "\nfour\n" in user["content"]


def test_a_prompt_of_ones_own():
    class Mine(Judge):
        base_url, model, system_prompt = "http://127.0.0.1:1/v1", "m", ""
        prompt = 'Level {row.level}: {question} / {answer} / {response} / {"score": 1} {other}'

    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q?"}], "level": 3}
    (message,) = Mine().messages("text", ["a", "b"], row)
    assert message["content"].startswith("Level 3: q? / a\nor: b / <<<response ")
    assert message["content"].endswith('/ {"score": 1} {other}')
    with pytest.raises(ConfigError, match=r"has \{row.level\}, but the task has only prompt"):
        Mine().messages("text", "a", {"prompt": "q"})


@given(st.text(max_size=60), st.text(max_size=30))
@settings(deadline=None, max_examples=200)
def test_a_response_can_neither_fill_placeholders_nor_end_its_own_markers(noise, question):
    attack = "{answer}{question}{row.secret}" + noise
    row = {"prompt": "{response}{answer}" + question, "secret": "S3CRET"}
    text = verdicts.fill("<{question}|{response}>", attack, "GOLD", row, 1000)
    start = text.index("<<<response ") if not question.count("<<<response ") else text.rindex("<<<response ")
    code = text[start + 12 : start + 28]
    assert text == f"<{row['prompt']}|<<<response {code}\n{attack}\n>>>end of response {code}>"
    assert code not in attack and "GOLD" not in text and "S3CRET" not in text


def test_a_long_response_is_cut_in_the_middle():
    text = verdicts.fill("{response}", "a" * 5000 + "b" * 5000, None, {}, 100)
    assert len(text) < 250 and "[... 9900 characters left out ...]" in text
    assert "\n" + "a" * 50 + "\n[" in text and "]\n" + "b" * 50 + "\n" in text


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "form", "score"),
    [
        ("Score: 7", "score", 0.7),
        ("**Score:** 10/10", "score", 1.0),
        ('{"score": 2.5}', "score", 0.25),
        ("Score: 3\nNo: wait.\nScore: 4", "score", 0.4),
        ("I would score it high", "score", None),
        ("Score: 11", "score", None),
        ("Score: -1", "score", None),
        ("Score: high", "score", None),
        ("<think>Score: 1</think>Score: 9", "score", 0.9),
        ("", "score", None),
        ("between 3 and 8", "number", 0.8),
        ("none", "number", None),
        ("Verdict: Correct", "verdict", 1.0),
        ("**Verdict: [no]**", "verdict", 0.0),
        ("Verdict: correct. On reflection, verdict: incorrect", "verdict", 0.0),
        ("Verdict: unclear", "verdict", None),
        ("correct", "verdict", None),
        ("Grade <5>", r"Grade <(\d+)>", 0.5),
        ("Answer: PASS", r"Answer: (\w+)", 1.0),
        ("Answer: maybe", r"Answer: (\w+)", None),
    ],
)
def test_reading_a_score(reply, form, score):
    assert verdicts.read_score(reply, form, (0, 10)) == score


def test_other_scales():
    assert verdicts.read_score("Score: 4", "score", (1, 5)) == 0.75
    assert verdicts.read_score("Score: 1", "score", (5, 1)) == 1.0  # 1 is the best mark


@given(st.text(alphabet="score:SCORE =*-+.0123456789verdict\n<think>/", max_size=80))
@settings(deadline=None, max_examples=200)
def test_no_reply_raises(reply):
    for form in verdicts.FORMATS:
        score = verdicts.read_score(reply, form, (0.0, 10.0))
        assert score is None or 0.0 <= score <= 1.0


def test_a_long_reply_is_read_quickly():
    for reply in ("score " * 50_000, "1" * 300_000, "score" + " " * 300_000, "1." * 100_000, "verdict:*" * 50_000):
        for form in verdicts.FORMATS:
            within(60, lambda reply=reply, form=form: verdicts.read_score(reply, form, (0, 10)), reply[:20])


def test_a_reader_of_ones_own_and_named_parts():
    with JudgeServer(scripted('{"a": 1, "b": 0.5}')) as server:
        assert judged(Judge(server.url, "m", parse=json.loads), "x") == [{"a": 1, "b": 0.5}]

        class Mine(Judge):
            def parse(self, reply):
                return len(reply) / 100

        judge = Mine(server.url, "m")
        reward = RewardSet([(2.0, judge), (1.0, Judge(server.url, "m", parse=lambda reply: {"style": 1}, name="s"))])
        assert asyncio.run(reward("x", "4", row=ROW)) == {"Mine": 0.36, "style": 1.0}


def test_json_that_is_none_is_asked_for_again():
    with JudgeServer(scripted("{", '{"other": 1}', '{"score": 0.5}')) as server:
        assert judged(Judge(server.url, "m", parse=lambda reply: json.loads(reply)["score"]), "x") == [0.5]
        assert len(server.requests) == 3


def test_an_unparsable_reply_is_asked_for_again_and_never_a_zero():
    with JudgeServer(scripted("no idea", "still none", "Score: 5")) as server:
        assert judged(Judge(server.url, "m"), "x") == [0.5]
        assert [request.get("seed") for request in server.requests] == [None, 1, 2]
    with JudgeServer(scripted("no idea")) as server:
        (error,) = judged(Judge(server.url, "m", retries=1), "x")
        assert isinstance(error, InfraError) and "no score in the reply 'no idea'" in str(error)
        assert len(server.requests) == 2
        assert judged(Judge(server.url, "m", retries=1, unparsable=0.25), "x") == [0.25]
    with JudgeServer(scripted((200, {}, completion("Well, ", "length")))) as server:
        (error,) = judged(Judge(server.url, "m", retries=0, max_tokens=3), "x")
        assert "which was cut at max_tokens 3" in str(error)


# -- trouble ---------------------------------------------------------------------------------------


def test_what_passes_is_waited_out():
    busy = (503, {}, "busy")
    limited = (429, {"Retry-After": "1"}, '{"error": {"message": "slow down"}}')
    with JudgeServer(scripted(busy, limited, "Score: 10")) as server:
        started = time.monotonic()
        assert judged(Judge(server.url, "m"), "x") == [1.0]
        assert len(server.requests) == 3 and time.monotonic() - started >= 1.0  # as Retry-After asked


def test_a_silent_server_costs_its_timeout_and_no_score():
    with JudgeServer(scripted(3600.0)) as server:
        (error,) = judged(Judge(server.url, "m", timeout=1.0, retries=1), "x")
        assert isinstance(error, InfraError) and "gave no answer within 1 s" in str(error)
        assert len(server.requests) == 2 and "--engine-timeout" not in str(error)
    with JudgeServer(scripted(30.0, "Score: 4")) as server:
        assert judged(Judge(server.url, "m", timeout=1.5, retries=1), "x") == [0.4]


def test_a_server_that_is_not_there_is_no_score():
    with JudgeServer(scripted("Score: 1")) as server:
        url = server.url
    (error,) = judged(Judge(url, "m", timeout=2.0, retries=0), "x")
    assert isinstance(error, InfraError) and "ConnectError" in str(error)


def test_the_episode_of_an_environment_is_left_out_not_scored():
    with JudgeServer(scripted((500, {}, "broken"))) as server:

        class Essay(agentrl.ToolEnv):
            tasks = {"train": [("Write.", "x")], "test": [("Write.", "x")]}
            reward = [(1.0, "exact_match"), (0.5, Judge(server.url, "m", timeout=1.0, retries=0))]

        env = Essay()
        env.reset(seed=0)
        with pytest.raises(InfraError, match="HTTP 500: broken"):
            env.step("Something.")
        server.answer = scripted("Score: 6")
        env.reset(seed=0)
        _, reward, terminated, _, info = env.step("Something else.")
        assert (reward, terminated, info["rewards"]) == (0.3, True, {"exact_match": 0.0, "Judge": 0.3})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (401, {}, '{"error": {"message": "bad key sk-secret"}}'),
            r"HTTP 401: bad key \*\*\*.*JUDGE_KEY, which is set",
        ),
        ((404, {}, '{"error": {"message": "no model m"}}'), r"HTTP 404: no model m. Check base_url .* and model"),
    ],
)
def test_what_no_retry_mends_ends_the_run_and_does_not_tell_the_key(answer, message, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    caplog.set_level(logging.DEBUG)
    with JudgeServer(scripted(answer)) as server:
        judge = Judge(server.url, "m", api_key_env="JUDGE_KEY")
        (error,) = judged(judge, "x")
        assert isinstance(error, ConfigError) and server.keys == ["Bearer sk-secret"]
        with pytest.raises(ConfigError, match=message):
            raise error
    assert "sk-secret" not in caplog.text + str(error) + repr(error) + repr(vars(judge))
    assert b"sk-secret" not in pickle.dumps(judge)


def test_a_response_too_long_for_the_judge_is_said():
    overflow = (400, {}, '{"error": {"message": "This model\'s maximum context length is 10 tokens"}}')
    with JudgeServer(scripted(overflow)) as server:
        (error,) = judged(Judge(server.url, "m"), "x")
        assert isinstance(error, InfraError) and "Lower max_chars (now 32000)" in str(error)
        assert len(server.requests) == 1


def test_only_so_many_requests_at_once():
    with JudgeServer(together(3, "Score: 5")) as server:
        scores = judged(Judge(server.url, "m", max_concurrency=3), *(f"text {n}" for n in range(12)))
        assert scores == [0.5] * 12 and len(server.requests) == 12 and server.most_at_once == 3
    with JudgeServer(together(12, "Score: 5")) as server:
        judged(Judge(server.url, "m", max_concurrency=12), *(f"text {n}" for n in range(12)))
        assert server.most_at_once == 12


# -- the cache -------------------------------------------------------------------------------------


def test_the_same_request_is_sent_once_also_at_the_same_time():
    with JudgeServer(together(2, "Score: 5")) as server:
        judge = Judge(server.url, "m")
        assert judged(judge, "x", "x", "y", "x") == [0.5] * 4 and len(server.requests) == 2
        assert judged(judge, "x", "y") == [0.5] * 2 and len(server.requests) == 2
        server.answer = scripted("Score: 5")
        judged(Judge(server.url, "m", cache=False), "x")
        assert len(server.requests) == 3


def test_one_who_leaves_does_not_take_the_answer_from_the_others():
    answered = threading.Event()

    async def leave(judge):
        leaving, staying = (asyncio.create_task(judge("x", "4", row=ROW)) for _ in range(2))
        while not server.requests:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.sleep(0)
        answered.set()
        try:
            return await asyncio.gather(leaving, staying, return_exceptions=True)
        finally:
            await judge.aclose()

    with JudgeServer(when(answered, "Score: 5")) as server:
        left, stayed = asyncio.run(leave(Judge(server.url, "m")))
        assert isinstance(left, asyncio.CancelledError) and stayed == 0.5 and len(server.requests) == 1


def test_trouble_is_not_kept(tmp_path):
    with JudgeServer(scripted("no score", "Score: 5")) as server:
        judge = Judge(server.url, "m", retries=0, cache=tmp_path / "c.sqlite")
        (error,) = judged(judge, "x")
        assert isinstance(error, InfraError) and judged(judge, "x") == [0.5]


def test_whatever_changes_the_reply_is_another_request(tmp_path):
    with JudgeServer(scripted("Score: 5")) as server:
        common = {"cache": tmp_path / "c.sqlite"}
        changes = [{}, {"model": "n"}, {"prompt": "{response}"}, {"system_prompt": ""}, {"temperature": 1.0}]
        for change in [*changes, {"max_tokens": 9}]:
            judged(Judge(server.url, **{"model": "m", **common, **change}), "x")
        assert len(server.requests) == 6
        judged(Judge(server.url, "m", **common), "x", row={"prompt": "another question"})
        assert len(server.requests) == 7
        # How a reply is read does not change it: the stored one is read again.
        assert judged(Judge(server.url, "m", parse="number", scale=(0, 5), **common), "x") == [1.0]
        assert len(server.requests) == 7


def test_a_file_keeps_replies_for_later_processes(tmp_path):
    file = tmp_path / "deep" / "judge.sqlite"
    code = (
        "import asyncio, sys\n"
        "from agentrl.rewards import Judge\n"
        "judge = Judge(sys.argv[1], 'm', cache=sys.argv[2], timeout=20)\n"
        "async def main():\n"
        "    return await asyncio.gather(*(judge(f't{n % 10}', 'a') for n in range(40)))\n"
        "print(sum(asyncio.run(main())))\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with JudgeServer(scripted("Score: 5")) as server:
        arguments = [sys.executable, "-c", code, server.url, str(file)]
        running = [subprocess.Popen(arguments, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        assert [process.communicate(timeout=60)[0].strip() for process in running] == ["20.0"] * 3
        assert 10 <= len(server.requests) <= 30
        asked = len(server.requests)
        assert judged(Judge(server.url, "m", cache=str(file)), "t1", row={})[0] == 0.5  # answer "4", not "a"
        assert len(server.requests) == asked + 1
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT count(*) FROM replies").fetchone() == (11,)


def test_a_file_that_is_no_cache_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("my notes, longer than a header of a database file would be" * 20)
    with pytest.raises(ConfigError, match="notes.txt cannot be used as a cache of judgements"):
        ReplyCache(tmp_path / "notes.txt")
    assert "my notes" in (tmp_path / "notes.txt").read_text()
    judge = Judge("http://127.0.0.1:1/v1", "m", cache=tmp_path / "notes.txt")
    assert isinstance(judged(judge, "x")[0], ConfigError)


def test_a_cache_that_breaks_meanwhile_costs_requests_and_no_score(tmp_path, caplog):
    with JudgeServer(scripted("Score: 5")) as server:
        judge = Judge(server.url, "m", cache=tmp_path / "c.sqlite")
        assert judged(judge, "x") == [0.5]
        (tmp_path / "c.sqlite").write_bytes(b"not a database at all" * 100)
        assert judged(judge, "x", "y", "z") == [0.5] * 3
    assert caplog.text.count("the cache of judgements cannot be used") == 1


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("agentrl.rewards.reply_cache.MEMORY_ENTRIES", 3)
    cache = ReplyCache()
    for n in range(5):
        cache.put(str(n), "r")
        cache.get("0")
    assert [n for n in range(5) if cache.get(str(n)) is not None] == [0, 3, 4]


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"base_url": ""}, "needs base_url, such as .* and model"),
        ({"promt": "x"}, "no setting 'promt'. Did you mean 'prompt'"),
        ({"prompt": "no place"}, r"has no \{response\}"),
        ({"parse": "grade"}, "needs a group around the score.*formats by name are score, number, verdict"),
        ({"parse": "("}, "or a regular expression with a group"),
        ({"timeout": 0}, "timeout is 0; a number of at least 0.001 is expected"),
        ({"retries": -1}, "retries is -1; a number of at least 0 is expected"),
        ({"max_concurrency": 0}, "max_concurrency is 0; a number of at least 1 is expected"),
        ({"scale": (1, 1)}, "two different numbers"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_once(given_settings, message):
    with pytest.raises(ConfigError, match=message):
        Judge(**{"base_url": "http://127.0.0.1:1/v1", "model": "m", **given_settings})


def test_a_key_of_ones_own_must_be_there_and_the_address_an_address():
    (error,) = judged(Judge("http://127.0.0.1:1/v1", "m", api_key_env="NO_SUCH_KEY"), "x")
    assert isinstance(error, ConfigError) and "NO_SUCH_KEY is not set" in str(error)
    (error,) = judged(Judge("127.0.0.1:1", "m"), "x")
    assert isinstance(error, ConfigError) and "base_url '127.0.0.1:1': expected an address" in str(error)


def test_a_subclass_by_name_serves_prompt_data(tmp_path):
    with JudgeServer(scripted("Score: 9")) as server:
        (tmp_path / "mine.py").write_text(
            "from agentrl.rewards import Judge\n"
            f"class MyJudge(Judge):\n    base_url = {server.url!r}\n    model = 'm'\n"
        )
        (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n')
        env = agentrl.PromptEnv(str(tmp_path / "t.jsonl"), reward=f"{tmp_path}/mine.py:MyJudge")
        env.reset(options={"split": "train", "index": 0})
        _, reward, _, _, info = env.step("<think>hidden</think>shown")
        assert (reward, info["rewards"]) == (0.9, {"MyJudge": 0.9})
        assert "shown" in server.requests[0]["messages"][1]["content"]
        assert "hidden" not in server.requests[0]["messages"][1]["content"]
    judge = load(f"{tmp_path}/mine.py:MyJudge")
    assert copy.deepcopy(judge) is judge and pickle.loads(pickle.dumps(Judge("http://h/v1", "m"))).model == "m"


def test_what_a_reader_raises_is_the_environments_error():
    with JudgeServer(scripted("Score: 9")) as server:
        (error,) = judged(Judge(server.url, "m", parse=lambda reply: 1 / 0), "x")
        assert isinstance(error, ZeroDivisionError)
        with pytest.raises(EnvError, match="finite number"):
            asyncio.run(RewardSet(Judge(server.url, "m", parse=lambda reply: "high"))("x", "4", row=ROW))


def test_a_reply_that_is_no_valid_text_is_kept_in_a_file_too(tmp_path):
    for cache in (tmp_path / "c.sqlite", True):
        with JudgeServer(scripted("broken \ud800 character. Score: 5")) as server:
            judge = Judge(server.url, "m", cache=cache)
            assert judged(judge, "x") == judged(judge, "x") == [0.5]
            assert len(server.requests) == 1
