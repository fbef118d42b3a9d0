"""``agentrl env``: list, show, check, play and new, as a person uses them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import agentrl
from agentrl.cli.env_new import write_package
from agentrl.cli.env_play import play, written_call
from agentrl.cli.main import main
from agentrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHOP = f"{ROOT / 'tests' / 'envs' / 'example_env.py'}:Shopping"


class Typed(io.StringIO):
    """A person at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def type_in(monkeypatch):
    def typed(text: str, *, terminal: bool = False) -> None:
        monkeypatch.setattr(sys, "stdin", (Typed if terminal else io.StringIO)(text))

    return typed


def test_list_says_what_each_is_and_hides_none_that_is_broken(capsys, monkeypatch, tmp_path):
    from agentrl.envs import registry

    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "worse.py").write_text("1 / 0\n")
    agentrl.register("worse", f"{tmp_path}/worse.py:Env")
    (tmp_path / "made.py").write_text('def make_env():\n    """Made by a function."""\n')
    agentrl.register("broken", f"{tmp_path}/broken.py:Env")
    agentrl.register("made", f"{tmp_path}/made.py:make_env")
    assert main(["env", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == set(agentrl.registered())
    assert "train, test" in lines["search"] and "Questions about a synthetic world" in lines["search"]
    assert "cannot be loaded: No module named 'nothing_of_that_name'" in lines["broken"]
    assert "cannot be loaded: ZeroDivisionError: division by zero" in lines["worse"]
    assert lines["made"].endswith("Made by a function.")


def test_show_tells_arguments_wrappers_and_gym_environments(capsys, tmp_path):
    (tmp_path / "made.py").write_text(
        f"import agentrl\ndef make_env(turns=3):\n"
        f"    return agentrl.wrappers.TimeLimit(agentrl.make({SHOP!r}), turns)\n"
    )
    assert main(["env", "show", f"{tmp_path}/made.py:make_env", "--env-arg", "turns=2"]) == 0
    out = capsys.readouterr().out
    assert "max turns: 2" in out and "wrapped: <TimeLimit<" in out
    shown = out[out.index("arguments (--env-arg):") :].partition("\n\n")[0].split()
    assert "turns" in shown and "max_turns" in shown and "tool_timeout" not in shown  # what the function takes
    assert main(["env", "show", f"{tmp_path}/made.py:make_env", "--env-arg", "tool_timeout=2"]) == 2
    taken = "It takes: call_format, max_turns, render_mode, template_kwargs, trusted_roles, turns."
    assert taken in capsys.readouterr().err
    assert main(["env", "show", "agentrl/search-v0"]) == 0
    assert "topk = 1" in capsys.readouterr().out
    assert main(["env", "show", "gym:Blackjack-v1"]) == 0
    out = capsys.readouterr().out
    assert "id = needed" in out and "0 = stick, 1 = hit" in out and "unlimited tasks" in out


def test_check_passes_or_fails_with_its_exit_code(capsys, tmp_path):
    assert main(["env", "check", SHOP]) == 0
    out = capsys.readouterr().out
    assert "both ways alike      passed" in out and out.endswith("passes.\n")
    (tmp_path / "bad.py").write_text(
        "import agentrl\nclass Bad(agentrl.Env):\n"
        "    def reset(self, *, seed=None, options=None):\n        super().reset(seed=seed)\n        return 'x', {}\n"
        "    def step(self, action):\n        return '', 1 / len(action), False, False, {}\n"
    )
    assert main(["env", "check", f"{tmp_path}/bad.py:Bad"]) == 1
    out = capsys.readouterr().out
    assert "any text             failed" in out and "ZeroDivisionError" in out and "checks failed." in out
    assert main(["env", "check", "gym:FrozenLake-v1", "--env-arg", "is_slippery=false"]) == 0


def test_an_episode_is_played_from_a_pipe(capsys, type_in):
    type_in("/call price item=pen\n.\nI think\nit is 7\n.\n")
    assert main(["env", "play", SHOP, "--split", "test", "--index", "3", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert "task test/3" in out and "tool price(" in out and "[user] " in out
    assert '[you] <tool_call>{"name": "price", "arguments": {"item": "pen"}}</tool_call>' in out
    assert "[tool] " in out and "[you] I think\nit is 7" in out
    assert "stop reason: done, success: no, total reward: 0" in out


def test_the_end_of_the_input_leaves_the_episode(capsys, type_in):
    for text in ("", "/quit\nnever read\n", "/call price item=pen\n"):
        type_in(text)
        assert main(["env", "play", SHOP]) == 0
        assert "left before the end; reward so far 0" in capsys.readouterr().out


def test_a_person_at_a_terminal_gets_a_prompt_and_help(capsys, type_in):
    type_in("/help\n/tools\n/call\n/call price\n/call price item\n/call price 'item\nhello\n", terminal=True)
    assert main(["env", "play", SHOP]) == 0
    out = capsys.readouterr().out
    assert out.count("A line is a turn.") == 2 and "> " in out
    assert "which tool?" in out and "'item' is not NAME=VALUE" in out and "No closing quotation" in out
    assert "[you] <tool_call>" in out and "[you] hello" not in out


def test_what_tools_and_environments_say_moves_no_cursor(capsys, type_in, tmp_path):
    (tmp_path / "loud.py").write_text(
        "import agentrl\n"
        "@agentrl.tool\n"
        "def shout() -> str:\n"
        "    'Shouts\\x1b[2J.'\n"
        "    return '\\x1b]0;owned\\x07'\n"
        "class Loud(agentrl.ToolEnv):\n"
        "    tools = [shout]\n"
        "    tasks = {'train': [('a\\x1b[1A task', 'b')], 'test': [('another', 'b')]}\n"
        "    reward = 'exact_match'\n"
        "class Failing(Loud):\n"
        "    def turn_reward(self, text):\n"
        "        raise ValueError('\\x1b[2J')\n"
    )
    type_in("/tools\n/call shout\nb\n")
    assert main(["env", "play", f"{tmp_path}/loud.py:Loud", "--split", "train"]) == 0
    assert main(["env", "show", f"{tmp_path}/loud.py:Loud"]) == 0
    assert main(["env", "check", f"{tmp_path}/loud.py:Failing"]) == 1
    out = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in out and out.count("\\x1b[2J") >= 3 and "a\\x1b[1A task" in out
    assert "\x1b" not in out


def test_a_game_is_won(capsys):
    env = agentrl.make("gym:FrozenLake-v1", is_slippery=False)
    moves = io.StringIO("down\ndown\nright\nright\ndown\nright\n")
    assert play(env, seed=0, options={}, source=moves) == 0
    assert "reward 1 (game 1)\n\nstop reason: done, success: yes, total reward: 1\n" in capsys.readouterr().out


def test_agents_take_turns(capsys):
    env = agentrl.make("multi_agent")
    agents = env.agents
    play(env, seed=0, options={}, source=Typed("hello\n"))
    out = capsys.readouterr().out
    assert f"{agents[0]}> " in out and f"[{agents[1]}: system]" in out


def test_calls_in_other_formats():
    assert written_call("search", {"query": "x"}, "tags:search,answer") == "<search>x</search>"
    assert written_call("end", {}, "tags:end") == "<end></end>"
    with pytest.raises(ConfigError, match="cannot write the format 'glm'"):
        written_call("search", {"query": "x"}, "glm")


def test_a_turn_that_begins_like_a_command_stands_between_dots(capsys, type_in):
    type_in(".\n/calling it a day\n.\n")
    assert main(["env", "play", SHOP]) == 0
    assert "[you] /calling it a day" in capsys.readouterr().out


def test_a_new_package_passes_as_it_is(tmp_path, capsys):
    assert main(["env", "new", "ware-house", "--dir", str(tmp_path)]) == 0
    folder = tmp_path / "ware-house"
    assert f"cd {folder}" in capsys.readouterr().out
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    assert main(["env", "check", f"{folder}/ware_house/env.py:WareHouseEnv"]) == 0
    assert main(["env", "new", "ware-house", "--dir", str(tmp_path)]) == 2
    assert "exists already; nothing was written" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_a_clear_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["env", "new", "depot", "--dir", str(tmp_path / "file")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_an_installed_package_is_known_by_its_name(tmp_path):
    """As pip would install it: the entry point of its pyproject.toml in the folder's metadata."""
    folder = write_package("depot", tmp_path)
    points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]["agentrl.envs"]
    info = folder / "depot-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: depot\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[agentrl.envs]\n" + "".join(f"{name} = {point}\n" for name, point in points.items())
    )
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "env", "list"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "depot        train, test  Add up what lies on two shelves." in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["Ware", "a b", "json", "class", "search", "../x", "x-", "agentrl", "1x", "tests", "numpy", "test"]
)
def test_names_that_cannot_be_are_refused(name, tmp_path, capsys):
    assert main(["env", "new", name, "--dir", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["env", "check"], "name of an environment"),
        (["env", "new"], "name of the new environment"),
        (["env", "check", "serch"], "Did you mean 'search'"),
        (["env", "check", "search", "--env-arg", "x=1"], "takes no argument 'x'"),
        (["env", "play", SHOP, "--split", "dev"], "--split dev: "),
        (["env", "play", SHOP, "--index", "-1"], "--index"),
        (["env", "play", SHOP, "--sed", "1"], "--seed"),
        (["env", "play", "gym:Nothing-v0"], "gym:Nothing-v0 cannot be made"),
        (["env", "new", "shelf", "--folder", "x"], "--folder"),
    ],
)
def test_wrong_use_is_a_clear_error(words, part, capsys):
    assert main(words) == 2
    assert part in capsys.readouterr().err


def test_help_of_each_action(capsys):
    for words, part in (
        (["env", "--help"], "agentrl env ACTION"),
        (["env", "list", "--help"], "agentrl env ACTION"),
        (["env", "show", "--help"], "env show NAME"),
        (["env", "check", "--help"], "--env-arg KEY=VALUE"),
        (["env", "play", "--help"], "/call TOOL NAME=VALUE"),
        (["env", "new", "--help"], "--dir PATH"),
    ):
        assert main(words) == 0
        assert part in capsys.readouterr().out


def test_nothing_heavy_is_imported():
    program = (
        "import sys; from agentrl.cli.main import main\n"
        "main(['env', 'list']); main(['env', 'check', 'gym:CartPole-v1'])\n"
        "heavy = [m for m in ('torch', 'ray', 'sglang', 'transformers', 'megatron') if m in sys.modules]\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_mistyped_command_is_no_turn(capsys, type_in):
    type_in("/cal look_up country=Peru\n/ foo\n/quit\n")
    assert main(["env", "play", SHOP]) == 0
    out = capsys.readouterr().out
    assert "there is no command /cal. Did you mean /call?" in out and "there is no command /." in out
    assert "left before the end" in out


def test_the_agents_of_an_episode_are_named_with_what_they_earn(capsys, type_in):
    type_in("nothing\n" * 12)
    assert main(["env", "play", "multi_agent", "--env-arg", 'rewards="opposed"']) == 0
    out = capsys.readouterr().out
    assert "[hinter] nothing" in out and "[you]" not in out
    assert "rewards: hinter -1, guesser 1" in out and "total rewards: hinter -1, guesser 1" in out


def test_check_says_each_check_as_it_begins(capsys):
    assert main(["env", "check", SHOP]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["names", "gymnasium"] and lines[-1].endswith("passes.")
