"""`agentrl eval` against a server: what it writes, says and returns, and how it goes on after anything."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_openai import FakeOpenAI, completion, refused

from agentrl.config import load_eval_config
from agentrl.errors import ConfigError, EnvError
from agentrl.evaluation.results import load
from agentrl.evaluation.run import Session, evaluate
from tests.evaluation.conftest import adds

ROOT = Path(__file__).parents[2]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def summary(folder, name="Sums"):
    return json.loads((folder / "summary.json").read_text())["sets"][name]


def lines(folder):
    return [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]


def test_a_whole_evaluation(run_eval, out, capsys):
    with FakeOpenAI(adds(wrong_from=9)) as server:
        assert run_eval(server, "--n-samples-per-eval-prompt", "2", "--temperature", "0.5") == 0
    scores = summary(out)
    assert (scores["episodes"], scores["planned"], scores["errors"], scores["complete"]) == (24, 24, 0, True)
    assert scores["success"]["mean"] == pytest.approx(9 / 12) and scores["success"]["n_tasks"] == 12
    assert (scores["turns"], scores["tool_calls"], scores["tokens"]) == (2.0, 1.0, 7.0)
    assert scores["pass_at_k"]["2"]["mean"] == scores["pass_hat_k"]["2"]["mean"] == pytest.approx(0.75)
    assert scores["categories"]["even"]["success"]["n"] == 12
    assert set(scores["reward_parts"]) == {"exact_match", "short"}
    shown = capsys.readouterr().out
    for part in ("Sums (test)", "75.0%", "pass^2", "errors (not scored)", "Sums, by category", "odd"):
        assert part in shown, part
    result = load(out)
    assert {t.info["category"] for t in result.sets["Sums"]} == {"odd", "even"} and len(lines(out)) == 24
    assert not (out / "metrics.jsonl").exists() and not (out / "trajectories").exists()


def test_tools_are_prepared_before_the_first_episode(run_eval, out, tmp_path, monkeypatch):
    """As in training: the first calls would wait for an index otherwise."""
    indexes = tmp_path / "indexes"
    monkeypatch.setenv("INDEXES", str(indexes))
    file = tmp_path / "almanac.py"
    file.write_text(
        "import os, agentrl\n"
        "class Almanac(agentrl.Tool):\n"
        "    name, description = 'almanac', 'Looks a word up.'\n"
        "    def prepare(self):\n"
        "        open(os.environ['INDEXES'], 'a').write('made ')\n"
        "    def __call__(self, word: str) -> str:\n"
        "        'Args:\\n    word: What.'\n"
        "        return word\n"
        "class Words(agentrl.ToolEnv):\n"
        "    tools, tasks, reward = [Almanac], {'test': [('Say yes.', 'yes')]}, 'exact_match'\n"
    )
    seen = []

    def answer(body):
        seen.append(indexes.read_text())
        return completion("yes")

    with FakeOpenAI(answer) as server:
        assert run_eval(server, "--env", f"{file}:Words") == 0
    assert set(seen) == {"made "} and summary(out, "Words")["success"]["mean"] == 1.0


def test_the_record_says_what_was_evaluated(run_eval, out, sums):
    with FakeOpenAI(adds()) as server:
        run_eval(server, "--limit", "3", "--seed", "5")
    record = json.loads((out / "run.json").read_text())
    (start,) = record["starts"]
    assert start["versions"]["gymnasium"] and start["host"] and len(start["agentrl_git"]["revision"]) == 40
    assert record["policy"] == f"m at {server.url}"
    what = record["evaluation"]
    assert what["model"] == {"base_url": server.url, "model": "m"} and what["sampling"]["seed"] == 5
    only = what["sets"]["Sums"]
    assert (only["env"], only["split"], only["tasks"]) == (sums, "test", 3)
    assert only["code_digest"].startswith("sha256:") and only["task_digest"].startswith("sha256:")
    assert json.loads((out / "config.json").read_text())["eval_tasks"] == 3


def test_it_says_how_many_tasks_are_left_out(run_eval, capsys):
    with FakeOpenAI(adds()) as server:
        assert run_eval(server, "--limit", "2") == 0
    assert "tasks       Sums 2 of 12" in capsys.readouterr().out


def test_json_for_scripts(run_eval, out, capsys):
    with FakeOpenAI(adds()) as server:
        assert run_eval(server, "--json", "--limit", "2") == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads((out / "summary.json").read_text())
    assert "Held-out evaluation" in said.err and len(said.out.splitlines()) == 1


def test_sampling_reaches_the_server(run_eval):
    with FakeOpenAI(adds()) as server:
        run_eval(server, "--limit", "1", "--temperature", "0.7", "--top-p", "0.9", "--max-tokens", "50")
    body = server.bodies[0]
    assert (body["temperature"], body["top_p"]) == (0.7, 0.9)
    assert 50 in (body.get("max_tokens"), body.get("max_completion_tokens"))


def test_the_training_split_is_called_by_its_name(run_eval, out, capsys):
    with FakeOpenAI(adds()) as server:
        assert run_eval(server, "--limit", "2", "--split", "train") == 0
    assert "TRAINING split" in capsys.readouterr().out
    assert "TRAINING split" in json.loads((out / "summary.json").read_text())["warnings"][0]


# -- errors and limits ----------------------------------------------------------------------------------


def test_infrastructure_errors_are_no_score_and_are_played_again(run_eval, out, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", "3,4")
    with FakeOpenAI(adds()) as server:
        assert run_eval(server, "--max-retries", "0", "--max-turns", "4") == 1
        scores = summary(out)
        assert (scores["errors"], scores["success"]["n"], scores["success"]["mean"]) == (2, 10, 1.0)
        assert "2 of 12 episodes ended for reasons of infrastructure" in capsys.readouterr().out
        assert run_eval(server, "--max-retries", "0", "--max-turns", "4", "--fail-on-error", "0.2") == 0
        monkeypatch.delenv("BROKEN")
        asked = len(server.bodies)
        assert run_eval(server, "--max-retries", "0", "--max-turns", "4") == 0
        assert len(server.bodies) == asked + 4, "two episodes of two turns were left"
    scores = summary(out)
    assert (scores["errors"], scores["success"]["n"], len(lines(out))) == (0, 12, 12)


def test_an_episode_is_tried_again_as_often_as_it_is_allowed(run_eval, out, monkeypatch):
    monkeypatch.setenv("BROKEN", "0")
    with FakeOpenAI(adds()) as server:
        assert run_eval(server, "--max-retries", "1", "--task-id", "0") == 1
    (line,) = lines(out)
    assert json.loads(line["info"])["attempt"] == 1 and line["outcome"] == "infra_error"


def test_when_nothing_can_be_scored_no_more_is_started(run_eval, out, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", ",".join(map(str, range(12))))
    with FakeOpenAI(adds()) as server:
        flags = ["--max-retries", "0", "--n-samples-per-eval-prompt", "8", "--concurrency", "4"]
        assert run_eval(server, *flags) == 1
    assert 32 <= len(lines(out)) <= 40
    said = " ".join(capsys.readouterr().out.split())
    assert "not one of" in said and "the first 32 episodes ended for reasons of infrastructure" in said


def test_the_time_limit_of_the_whole_run(run_eval, out, capsys):
    def slow(body):
        time.sleep(0.15)
        return adds()(body)

    flags = ["--concurrency", "1", "--eval-time-limit", "2"]  # of 3.6 s at least
    with FakeOpenAI(slow) as server:
        assert run_eval(server, *flags) == 1
        played = summary(out)["episodes"]
        assert 0 < played < 12 and summary(out)["not_attempted"] == 12 - played and not summary(out)["complete"]
        said = capsys.readouterr().out
        assert "were not attempted: the time of --eval-time-limit was up" in " ".join(said.split())
        server.script[:] = [adds()]
        assert run_eval(server) == 0
    assert (summary(out)["episodes"], summary(out)["complete"], len(lines(out))) == (12, True, 12)


def test_the_time_limit_of_an_episode(run_eval, out):
    def slow(body):
        if body["messages"][-1]["role"] == "tool":
            time.sleep(1.5)
        return adds()(body)

    with FakeOpenAI(slow) as server:
        assert run_eval(server, "--limit", "1", "--episode-timeout", "1") == 0
    assert summary(out)["stop_reasons"] == {"engine_timeout": 1} and summary(out)["truncation_rate"] == 1.0


def test_a_wrong_key_ends_it_at_once(run_eval, out):
    with FakeOpenAI(refused(401, "no such key"), models=404) as server, pytest.raises(ConfigError):
        run_eval(server)
    assert not (out / "summary.json").exists()


# -- going on -------------------------------------------------------------------------------------------


def test_a_complete_evaluation_is_not_played_again(run_eval, out, capsys):
    with FakeOpenAI(adds()) as server:
        assert run_eval(server) == 0
        before, asked = lines(out), len(server.bodies)
        capsys.readouterr()
    assert run_eval(server) == 0, "the server is gone, and not needed"
    assert len(server.bodies) == asked and lines(out) == before
    assert "100.0%" in capsys.readouterr().out
    assert len(json.loads((out / "run.json").read_text())["starts"]) == 2


def test_a_torn_line_is_cut_away_and_its_episode_played_again(run_eval, out):
    with FakeOpenAI(adds()) as server:
        run_eval(server)
        file = out / "trajectories.jsonl"
        text = file.read_bytes()
        file.write_bytes(text[:-100])
        (out / "summary.json").unlink()
        asked = len(server.bodies)
        assert run_eval(server) == 0
        assert len(server.bodies) == asked + 2
    assert len({line["trajectory_id"] for line in lines(out)}) == len(lines(out)) == 12


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--temperature", "1"], "sampling/eval_temperature: was 0.0, is 1.0"),
        (["--limit", "4"], "Sums/task_digest: the list of tasks is another one"),
        (["--model", "other"], "model/model: was 'm', is 'other'"),
        (["--n-samples-per-eval-prompt", "2", "--temperature", "0"], "episodes_per_task: was 1, is 2"),
        (["--env-arg", "max_calls=3"], "env_args/max_calls: was None, is 3"),
    ],
)
def test_another_evaluation_is_refused_by_what_differs(run_eval, out, flags, part):
    with FakeOpenAI(adds()) as server:
        run_eval(server, "--limit", "3")
        before = (out / "trajectories.jsonl").read_bytes()
        wanted = flags if "--limit" in flags else ["--limit", "3", *flags]
        with pytest.raises(ConfigError) as caught:
            run_eval(server, *wanted)
    assert part in str(caught.value) and "another --output-dir" in str(caught.value)
    assert (out / "trajectories.jsonl").read_bytes() == before


def test_changed_code_of_the_environment_is_noticed(run_eval, out, tmp_path):
    with FakeOpenAI(adds()) as server:
        run_eval(server, "--limit", "3")
        file = tmp_path / "sums.py"
        file.write_text(file.read_text() + "\n# changed\n")
        with pytest.raises(ConfigError, match="code_digest: the environment's code has changed"):
            run_eval(server, "--limit", "3")


def test_a_training_run_is_no_place_for_an_evaluation(run_eval, out):
    out.mkdir()
    (out / "config.json").write_text('{"rollout_batch_size": 32}')
    with FakeOpenAI(adds()) as server, pytest.raises(ConfigError, match="holds another run"):
        run_eval(server)


@pytest.fixture
def gate():
    over = threading.Event()
    yield over
    over.set()


def stopping(after, gate):
    """Answers so many requests; the others wait until the gate is open."""
    asked = itertools.count(1)

    def answer(body):
        if next(asked) > after:
            gate.wait(60)
        return adds()(body)

    return answer


def test_an_evaluation_that_is_killed_goes_on(sums, out, gate):
    with FakeOpenAI(stopping(8, gate)) as server:  # two episodes at once: of five, three at least are over
        command = [sys.executable, "-m", "agentrl.cli.main", "eval", "--env", sums, "--base-url", server.url]
        command += ["--model", "m", "--concurrency", "2", "--output-dir", str(out)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=out.parent)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (
            not (out / "trajectories.jsonl").is_file() or len(lines_so_far(out)) < 3 or len(server.bodies) < 10
        ):
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        first.stderr.close()
        there = {json.loads(line)["trajectory_id"] for line in lines_so_far(out)}
        assert 3 <= len(there) < 12 and not (out / "summary.json").exists()
        asked = len(server.bodies)
        gate.set()
        again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, cwd=out.parent)
        assert again.returncode == 0, again.stderr
        assert len(server.bodies) - asked == 2 * (12 - len(there)), "only what was missing"
    assert f"{len(there)} episodes are there already" in again.stdout
    assert len({line["trajectory_id"] for line in lines(out)}) == len(lines(out)) == 12
    assert summary(out)["success"]["mean"] == 1.0


def lines_so_far(folder):
    return [line for line in (folder / "trajectories.jsonl").read_bytes().splitlines(True) if line.endswith(b"\n")]


def test_an_interrupted_evaluation_leaves_a_summary(sums, out, gate):
    with FakeOpenAI(stopping(4, gate)) as server:
        command = [sys.executable, "-m", "agentrl.cli.main", "eval", "--env", sums, "--base-url", server.url]
        command += ["--model", "m", "--concurrency", "1", "--output-dir", str(out)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        started = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (
            not (out / "trajectories.jsonl").is_file() or len(lines_so_far(out)) < 2
        ):
            assert started.poll() is None
            time.sleep(0.02)
        started.send_signal(signal.SIGINT)
        said, _ = started.communicate(timeout=30)
    assert started.returncode == 130 and "goes on" in said
    assert summary(out)["not_attempted"] > 0 and not summary(out)["complete"]


def test_nothing_heavy_is_imported_for_a_server(sums, out):
    with FakeOpenAI(adds()) as server:
        code = (
            "import sys; from agentrl.cli.main import main;"
            f"code = main(['eval', '--env', {sums!r}, '--base-url', {server.url!r}, '--limit', '2', '--output-dir', "
            f"{str(out)!r}]);"
            "heavy = {'torch', 'ray', 'sglang', 'transformers', 'megatron', 'pyarrow', 'tokenizers', 'aiohttp'};"
            "print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.stderr.strip().splitlines()[-1] == "0 []", done.stderr


def test_an_evaluation_without_any_answer_is_a_failure(run_eval, out):
    with FakeOpenAI(completion("I do not know.")) as server:
        assert run_eval(server, "--limit", "2") == 0, "a wrong answer is a score"
    assert summary(out)["success"]["mean"] == 0.0


def test_a_folder_of_its_own_each_time_when_none_is_named(sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with FakeOpenAI(adds()) as server:
        for _ in range(2):
            cfg = load_eval_config(["--env", sums, "--base-url", server.url, "--model", "m", "--limit", "1"])
            assert evaluate(cfg) == 0
    assert len([p for p in (tmp_path / "runs").iterdir() if p.name.startswith("eval-Sums-")]) == 2


def test_many_sets_have_a_row_each(run_eval, out, tmp_path, capsys):
    files = []
    for number in range(3):
        file = tmp_path / f"tasks{number}.jsonl"
        file.write_text('{"prompt": "1 + 1", "label": "2"}\n')
        files += ["--eval-prompt-data", f"set-{number}", str(file)]
    with FakeOpenAI(completion("2")) as server:
        assert run_eval(server, "--limit", "2", *files) == 0
    said = capsys.readouterr().out
    assert "set-2 (all)" in said and "1 of 1" in said
    assert set(load(out).sets) == {"Sums", "set-0", "set-1", "set-2"}


def test_names_from_an_environment_do_nothing_to_the_terminal(run_eval, out, tmp_path, capsys):
    code = (tmp_path / "sums.py").read_text()
    (tmp_path / "sums.py").write_text(code.replace('"odd"', r'"[/b]\x1b[2J"'))
    with FakeOpenAI(adds()) as server:
        assert run_eval(server) == 0
    shown = capsys.readouterr().out
    assert r"[/b]\x1b[2J" in shown and "\x1b" not in shown
    assert "[/b]\x1b[2J" in summary(out)["categories"]


TELEPHONE = """
from agentrl import MultiAgentEnv


class Telephone(MultiAgentEnv):
    agents = ("teller", "writer")

    def num_tasks(self, split):
        return 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "The word is rain.", {"prompts": dict.fromkeys(self.agents, "Speak.")}

    def step(self, action):
        if self.acting == "teller":
            return action, 0.0, False, False, {}
        return "", 1.0, True, False, {"success": True, "agent_rewards": {"writer": 1.0}}
"""


def test_a_kill_between_the_agents_of_an_episode_loses_none(run_eval, out, tmp_path):
    (tmp_path / "phone.py").write_text(TELEPHONE)
    with FakeOpenAI(completion("rain")) as server:
        flags = ["--env", f"{tmp_path / 'phone.py'}:Telephone", "--base-url", server.url, "--output-dir", str(out)]
        assert evaluate(load_eval_config(flags)) == 0
        file, asked = out / "trajectories.jsonl", len(server.bodies)
        assert len(lines(out)) == 6
        whole = file.read_text().splitlines(keepends=True)
        for left in ("".join(whole[:-1]), "".join(whole[:-1]) + whole[-1][:50]):
            file.write_text(left)
            assert evaluate(load_eval_config(flags)) == 0
            assert len(server.bodies) == asked + 2, "that episode is played again, and no other"
            asked = len(server.bodies)
            assert sorted(line["trajectory_id"] for line in lines(out)) == sorted(
                json.loads(line)["trajectory_id"] for line in whole
            )
    scores = summary(out, "Telephone")
    assert scores["episodes"] == 3 and {a: s["mean"] for a, s in scores["agents"].items()} == {"teller": 0, "writer": 1}


def test_an_environment_with_an_episode_id_of_its_own(run_eval, out, tmp_path):
    code = (tmp_path / "sums.py").read_text()
    (tmp_path / "sums.py").write_text(
        code.replace('info["category"] =', 'info["episode_id"] = "1"\n        info["category"] =')
    )
    with FakeOpenAI(adds()) as server:
        assert run_eval(server) == 0
        asked = len(server.bodies)
        assert run_eval(server) == 0 and len(server.bodies) == asked
    assert summary(out)["episodes"] == 12


def test_what_was_said_is_in_the_file_and_not_in_memory(run_eval, out, monkeypatch):
    monkeypatch.setenv("BROKEN", "3")
    sessions = []
    monkeypatch.setattr(Session, "end", lambda self: sessions.append(self) or 0)
    with FakeOpenAI(adds()) as server:
        run_eval(server, "--max-retries", "0")
        run_eval(server, "--max-retries", "0")
    first, second = (s._ended["Sums"] for s in sessions)
    assert len(first) == len(second) == 12 and not any(t.messages or t.segments for t in first + second)
    assert all(line["messages"] for line in lines(out) if line["outcome"] == "completed")


def test_a_server_that_only_fails_is_said_at_once_and_at_the_end(run_eval, out, capsys, monkeypatch):
    monkeypatch.setattr("agentrl.evaluation.run.POLL_SECONDS", 0.02)
    with FakeOpenAI(refused(500, "oops, out of memory")) as server:
        assert run_eval(server, "--limit", "2", "--engine-timeout", "2", "--max-retries", "0") == 1
    shown = capsys.readouterr().out
    assert "warning: a request got no answer and is sent again: HTTP 500: oops, out of memory" in shown
    assert shown.count("is sent again") == 1
    assert "not one of 2 episodes could be scored" in shown and "the last: engine_error" in shown
    assert shown.rindex("oops, out of memory") > shown.index("not one of 2")


def test_a_reward_that_cannot_work_is_said_before_the_server_is_asked(run_eval, sums):
    file = Path(sums.rpartition(":")[0])
    file.write_text(file.read_text().replace("return 0.25 if len(text) < 3 else 0.0", "return textt"))
    with FakeOpenAI(adds()) as server:
        with pytest.raises(EnvError, match=r"Sums: an episode .*NameError: .*'textt'.*\(sums.py:\d+ in short\)"):
            run_eval(server)
        assert not server.bodies
