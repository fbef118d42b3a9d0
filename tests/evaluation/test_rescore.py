"""Rewards applied anew to stored episodes, without a model."""

import json

import pytest
from fake_openai import FakeOpenAI, completion

from agentrl.config import load_eval_config
from agentrl.data.episodes import by_episode
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.rescore import turn_texts
from agentrl.evaluation.results import load
from agentrl.evaluation.run import evaluate
from agentrl.types import Task, Trajectory
from tests.evaluation.conftest import adds


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def rescore(out, *flags):
    return evaluate(load_eval_config(["--rescore", "--output-dir", str(out), *flags]))


def change(tmp_path, old, new, file="sums.py"):
    """Change the code of an environment, as its author would, and forget that it was loaded."""
    import sys

    path = tmp_path / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    for name in [name for name in sys.modules if name.startswith(f"agentrl_file_{path.stem}_")]:
        del sys.modules[name]


def test_changed_rewards_of_a_tool_env(run_eval, out, tmp_path, capsys):
    with FakeOpenAI(adds(wrong_from=9)) as server:
        run_eval(server)
        asked = len(server.bodies)
        before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file() and p.name != ".lock"}
        change(tmp_path, "return 0.25 if len(text) < 3 else 0.0", "return 2.0 if len(text) == 1 else 0.0")
        capsys.readouterr()
        assert rescore(out) == 0
        assert len(server.bodies) == asked, "nothing is generated"
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file() and p.name != ".lock"} == before
    old, new = load(out), load(out / "rescored-1")
    assert old.summaries["Sums"]["reward_parts"]["short"] == 0.25
    assert new.summaries["Sums"]["reward_parts"] == {"exact_match": 0.75, "short": pytest.approx(2 * 5 / 12)}
    assert new.summaries["Sums"]["success"]["mean"] == pytest.approx(9 / 12)
    assert new.summaries["Sums"]["categories"]["odd"]["reward"]["n"] == 6
    assert [t.messages for t in new.sets["Sums"]] == [t.messages for t in old.sets["Sums"]]
    assert new.record["rescored"] == {"custom_rm_path": None} and new.config["env"] == old.config["env"]
    assert "success 75.0% → 75.0%" in capsys.readouterr().out
    assert rescore(out / "rescored-1") == 0, "what was scored anew can be scored anew"
    assert load(out / "rescored-1" / "rescored-1").summaries["Sums"]["reward"] == new.summaries["Sums"]["reward"]


def test_unchanged_rewards_give_the_same(run_eval, out):
    with FakeOpenAI(adds(wrong_from=9)) as server:
        run_eval(server)
    assert rescore(out) == 0
    for old, new in zip(load(out).sets["Sums"], load(out / "rescored-1").sets["Sums"], strict=True):
        assert (old.reward, old.rewards, old.success, old.turn_rewards) == (
            new.reward,
            new.rewards,
            new.success,
            new.turn_rewards,
        )


def test_a_reward_function_from_elsewhere(run_eval, out, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def mine(text, answer, *, turns, calls):\n"
        "    assert len(turns) == 2 and turns[0].startswith('<tool_call>') and calls == [\n"
        "        {'name': 'note', 'arguments': {'text': 'go'}}]\n"
        "    return float(int(text) < 5)\n"
    )
    with FakeOpenAI(adds()) as server:
        run_eval(server)
    capsys.readouterr()
    assert rescore(out, "--custom-rm-path", f"{tmp_path / 'mine.py'}:mine", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["sets"]["Sums"]["success"]["mean"] == pytest.approx(3 / 12)
    assert summary["rescored_from"] == str(out) and summary["kept"] == {}


def test_errors_and_truncated_episodes(run_eval, out, monkeypatch, tmp_path):
    monkeypatch.setenv("BROKEN", "2")
    with FakeOpenAI(adds()) as server:
        run_eval(server, "--max-turns", "1", "--max-retries", "0", "--limit", "4")
    monkeypatch.delenv("BROKEN")
    assert rescore(out) == 0
    summary = load(out / "rescored-1").summaries["Sums"]
    assert summary["truncation_rate"] == 1.0 and summary["success"]["mean"] == summary["reward"]["mean"] == 0.0
    assert summary["errors"] == load(out).summaries["Sums"]["errors"]


def test_a_reward_that_fails_leaves_the_old_one_and_says_so(run_eval, out, tmp_path, capsys):
    with FakeOpenAI(adds()) as server:
        run_eval(server, "--limit", "4")
    (tmp_path / "bad.py").write_text("def bad(text, answer):\n    raise KeyError(answer)\n")
    capsys.readouterr()
    assert rescore(out, "--custom-rm-path", f"{tmp_path / 'bad.py'}:bad") == 1
    assert "keep their old reward: KeyError" in " ".join(capsys.readouterr().out.split())
    assert load(out / "rescored-1").summaries["Sums"]["success"]["mean"] == 1.0


# -- environments that reward by themselves are played through again -------------------------------------

GAME = '''
import os
import agentrl


class Doors(agentrl.Env):
    """Three doors, the right one by the seed; a step towards it is worth STEP."""

    STEP = 0.5

    def num_tasks(self, split):
        return 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.right, self.tried = options["index"] % 3, 0
        return "Which door, 0, 1 or 2?", {}

    def step(self, action):
        self.tried += 1
        done = action.strip() == str(self.right)
        closed = "Closed." + os.environ.get("MORE", "")
        return ("Open." if done else closed), 1.0 if done else self.STEP, done, False, {"success": done}
'''


@pytest.fixture
def played(tmp_path, out):
    """An evaluation of the game, by a model that tries door after door."""
    (tmp_path / "doors.py").write_text(GAME)
    with FakeOpenAI(lambda body: completion(str(len(body["messages"]) // 2))) as server:
        argv = ["--env", f"{tmp_path / 'doors.py'}:Doors", "--base-url", server.url, "--output-dir", str(out)]
        assert evaluate(load_eval_config(argv)) == 0
    return out


def test_a_deterministic_environment_is_played_through_again(played, tmp_path):
    change(tmp_path, "STEP = 0.5", "STEP = -1.0", "doors.py")
    assert rescore(played) == 0
    old, new = load(played).sets["Doors"], load(played / "rescored-1").sets["Doors"]
    assert sorted(t.reward for t in old) == [1.0, 1.0, 1.5, 2.0]
    assert sorted(t.reward for t in new) == [-1.0, 0.0, 1.0, 1.0]
    assert all(t.success for t in new) and max(t.turn_rewards for t in new) == [1.0]


def test_an_episode_that_a_budget_ended_is_played_through_too(played, tmp_path):
    """Behind its last turn there is no answer in the record."""
    with FakeOpenAI(completion("7")) as server:
        argv = ["--env", f"{tmp_path / 'doors.py'}:Doors", "--base-url", server.url, "--max-turns", "2"]
        assert evaluate(load_eval_config([*argv, "--output-dir", str(tmp_path / "short")])) == 0
    change(tmp_path, "STEP = 0.5", "STEP = -1.0", "doors.py")
    assert rescore(tmp_path / "short") == 0
    (one, *_) = load(tmp_path / "short" / "rescored-1").sets["Doors"]
    assert (one.reward, one.success, str(one.stop_reason)) == (-2.0, False, "max_turns")


def test_one_that_answers_otherwise_is_not_judged_by_its_new_rewards(played, monkeypatch, capsys):
    monkeypatch.setenv("MORE", " Try another.")
    capsys.readouterr()
    assert rescore(played) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "2 episodes keep their old reward: its environment answers otherwise now" in said


def test_a_reward_function_is_refused_where_there_is_none_to_replace(played, tmp_path):
    (tmp_path / "mine.py").write_text("def mine(text, answer):\n    return 1.0\n")
    with pytest.raises(ConfigError, match="Doors is no ToolEnv"):
        rescore(played, "--custom-rm-path", f"{tmp_path / 'mine.py'}:mine")
    assert not (played / "rescored-1").exists()


# -- what is asked for wrongly ---------------------------------------------------------------------------


def test_what_cannot_be_scored_anew(tmp_path, out):
    for flags, part in (((), "needs --output-dir"), (("--output-dir", "x", "--limit", "3"), "--limit has no effect")):
        with pytest.raises(ConfigError, match=part):
            load_eval_config(["--rescore", *flags])
    with pytest.raises(DataError, match="no such run folder"):
        rescore(out)


def test_turns_as_the_environment_saw_them():
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "An example."},
        {"role": "user", "content": "1?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"function": {"name": "find", "arguments": {"q": "</tool_call>"}}}],
        },
        {"role": "tool", "content": "It."},
        {"role": "assistant", "content": "It"},
    ]
    trajectory = Trajectory("t", "g", Task("t", 0), [], messages, num_turns=2)
    first, last = turn_texts(trajectory)
    assert first == (
        '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "find", "arguments": {"q": "\\u003c/tool_call>"}}\n'
        "</tool_call>"
    )
    assert last == "It"
    trajectory.info["turns"] = [{"finish_reason": "stop"}, {"finish_reason": "length"}]
    assert turn_texts(trajectory) == [first], "a turn that was cut short reached no environment"
    assert turn_texts(Trajectory("t", "g", Task("t", 0), [], messages[:3])) == []
    assert by_episode([]) == []
