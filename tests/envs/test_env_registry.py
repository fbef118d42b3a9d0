"""Finding environments by name, module, file and entry point."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import agentrl
from agentrl.envs import registry
from agentrl.errors import ConfigError
from agentrl.loading import load_object, portable


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)


def test_every_form_of_name_makes_the_same_environment(guess_file):
    agentrl.register("guess", f"{guess_file}:Guess", max_turns=3)
    assert "guess" in agentrl.registered()
    for spec in ("guess", "agentrl/guess", "agentrl/guess-v0"):
        env = agentrl.make(spec)
        assert (type(env).__name__, env.max_turns) == ("Guess", 3)
    assert agentrl.make("guess", max_turns=5).max_turns == 5
    assert gymnasium.make("agentrl/guess-v0").unwrapped.max_turns == 3
    assert type(agentrl.make(f"{guess_file}:Guess")) is type(agentrl.make("guess"))
    assert type(agentrl.make("agentrl.envs.core:Env")) is agentrl.Env


def test_a_gymnasium_registration_of_somebody_else(guess_file):
    gymnasium.register("other/Guess-v3", entry_point=load_object(f"{guess_file}:Guess"))
    assert type(agentrl.make("other/Guess-v3", max_turns=2)).__name__ == "Guess"
    with pytest.raises(ConfigError, match="not an agentrl.Env"):
        agentrl.make("CartPole-v1")


def test_entry_points_of_installed_packages(guess_file, monkeypatch):
    point = importlib.metadata.EntryPoint("installed", f"{guess_file}:Guess", "agentrl.envs")
    monkeypatch.setattr(registry, "_entry_points", lambda: [point])
    assert "installed" in agentrl.registered()
    assert type(agentrl.make("installed")).__name__ == "Guess"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("serch", "unknown environment 'serch'. Did you mean 'search'?"),
        ("agentrl/serch-v0", "Did you mean 'search'?"),
        ("", "unknown environment ''"),
        ("no.such.module:Env", "no module 'no' can be imported"),
        ("agentrl.envs.tool_env:ToolEnw", "has no 'ToolEnw'. Did you mean 'ToolEnv'?"),
        ("agentrl.envs.core:_SPACE", "not a subclass of agentrl.Env"),
        ("agentrl.envs.core:say_how_it_ended", "needs the argument 'info'"),
        ("agentrl.envs.wrappers:Wrapper", "returns Wrapper(YourEnv())"),
        ("missing/file.py:Env", "missing/file.py'"),
        ("agentrl.envs:", "expected module:Name"),
        ("missing/file.py", "there is no file"),
        (3, "a subclass of agentrl.Env, got 3"),
        (dict, "a subclass of agentrl.Env, got <class 'dict'>"),
    ],
)
def test_unknown_names_are_errors_with_the_nearest_one(spec, message):
    with pytest.raises(ConfigError) as caught:
        agentrl.make(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("colon", ["", ":"])
def test_a_file_without_a_class_names_those_in_it(guess_file, tmp_path, colon):
    with pytest.raises(ConfigError) as caught:
        agentrl.make(guess_file + colon)
    assert f"add :ClassName, as in '{guess_file}:Guess'. Environments in the file: Guess, AsyncGuess." in str(
        caught.value
    )
    (tmp_path / "empty_file.py").write_text("from agentrl import Env\n")
    with pytest.raises(ConfigError, match="no subclass of agentrl.Env or agentrl.ToolEnv is defined"):
        agentrl.make(f"{tmp_path}/empty_file.py")


def test_a_class_is_made_as_it_is(guess_file):
    cls = load_object(f"{guess_file}:Guess")
    env = agentrl.make(cls, max_turns=2)
    assert (type(env), env.max_turns) == (cls, 2)
    assert type(gymnasium.make(env.spec).unwrapped) is cls
    with pytest.raises(ConfigError, match="environment 'Guess' takes no argument 'max_turn'"):
        agentrl.make(cls, max_turn=3)


def test_a_function_may_stand_for_the_class(guess_file, tmp_path):
    """What it returns is taken with its wrappers: ours as they are, Gymnasium's inside ours."""
    (tmp_path / "made.py").write_text(
        "import gymnasium, agentrl\n"
        f"def ours(loud=False):\n    return agentrl.wrappers.Wrapper(agentrl.make({guess_file!r} + ':Guess'))\n"
        "def theirs():\n    return gymnasium.wrappers.TimeLimit(ours(), 2)\n"
        "def bare():\n    return gymnasium.make('CartPole-v1')\n"
        "def nothing():\n    return None\n"
    )
    for name in ("ours", "theirs"):
        env = agentrl.make(f"{tmp_path}/made.py:{name}", max_turns=3)
        assert isinstance(env, agentrl.wrappers.Wrapper)
        assert (type(env.unwrapped).__name__, env.max_turns, env.splits) == ("Guess", 3, ("train", "test"))
        again = gymnasium.make(env.spec)
        assert again.unwrapped.max_turns == 3 and again.spec.additional_wrappers == env.spec.additional_wrappers
        steps = env.reset(seed=0) and [env.step("no")[3] for _ in range(2)]
        assert steps == [False, name == "theirs"]
    agentrl.register("made", f"{tmp_path}/made.py:ours", loud=True)
    assert isinstance(agentrl.make("made"), agentrl.wrappers.Wrapper)
    assert type(gymnasium.make("agentrl/made-v0", max_turns=5).env.env).__name__ == "Wrapper"
    with pytest.raises(ConfigError, match="takes no argument 'laud'. Did you mean 'loud'"):
        agentrl.make("made", laud=True)
    with pytest.raises(
        ConfigError, match="returned a CartPoleEnv, not an agentrl.Env. To play it in text: gym:CartPole-v1"
    ):
        agentrl.make(f"{tmp_path}/made.py:bare")
    with pytest.raises(ConfigError, match="returned a NoneType"):
        agentrl.make(f"{tmp_path}/made.py:nothing")


def test_unknown_and_missing_arguments(guess_file, tmp_path):
    with pytest.raises(ConfigError, match="takes no argument 'max_turn'. Did you mean 'max_turns'"):
        agentrl.make(f"{guess_file}:Guess", max_turn=3)
    with pytest.raises(ConfigError, match="needs the argument 'path'"):
        agentrl.make("agentrl.envs.builtin.prompt:PromptEnv")
    with pytest.raises(ConfigError, match="takes no argument 'inputkey'. Did you mean 'input_key'"):
        agentrl.make("agentrl.envs.builtin.prompt:PromptEnv", path="x", inputkey="q")


@pytest.mark.parametrize(("name", "entry_point"), [("a b", "m:C"), ("", "m:C"), ("a", "module"), ("a", None)])
def test_bad_registrations_are_refused(name, entry_point):
    with pytest.raises(ConfigError):
        agentrl.register(name, entry_point)


def test_errors_in_the_users_file_pass_through(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        agentrl.make(f"{tmp_path}/broken.py:Env")


def test_a_file_is_loaded_once_and_may_import_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_env.py").write_text("NAME = 'n'\n")
    (tmp_path / "env_file.py").write_text(
        "import agentrl, neighbour_of_env\nclass Mine(agentrl.ToolEnv):\n    tasks = {'train': ['a'], 'test': ['b']}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert portable("env_file.py:Mine") == f"{tmp_path}/env_file.py:Mine"
    assert load_object("env_file.py:Mine") is load_object(f"{tmp_path}/env_file.py:Mine")
    assert portable("pkg.module:Mine") == "pkg.module:Mine"


def test_an_entry_means_the_same_in_another_process(example_spec, tmp_path, monkeypatch):
    agentrl.register("shop", example_spec)
    entry = registry.find("shop")
    program = f"import agentrl; print(agentrl.make({entry.entry_point!r}).reset(seed=1)[1]['task_id'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(agentrl.__file__).parent.parent)},
    )  # fmt: skip
    assert done.stdout.strip() == agentrl.make("shop").reset(seed=1)[1]["task_id"], done.stderr


def test_a_package_of_the_current_folder_is_found_although_the_command_lies_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "my_env.py").write_text((Path(__file__).parent / "example_env.py").read_text())
    code = (
        "import sys; sys.path.remove(''); import agentrl; "
        "print(type(agentrl.make('my_package.my_env:Shopping')).__name__)"
    )
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.stdout.strip() == "Shopping", result.stderr


def test_an_edit_of_the_same_length_is_seen_and_nothing_is_written_beside_the_file(tmp_path):
    from agentrl.loading import load_object

    file = tmp_path / "quick.py"
    for value in ("1", "2"):  # in the same second, of the same size
        file.write_text(f"VALUE = {value}\n", encoding="utf-8")
        for name in [name for name in sys.modules if name.startswith("agentrl_file_quick_")]:
            del sys.modules[name]
        assert load_object(f"{file}:VALUE") == int(value)
    assert [path.name for path in tmp_path.iterdir()] == ["quick.py"]
