import os
import subprocess
import sys
import types

import pytest

from agentrl.cli import extras
from agentrl.cli import main as cli
from agentrl.errors import CheckpointError, ConfigError, StorageError

HEAVY = [
    "torch",
    "ray",
    "sglang",
    "megatron",
    "transformers",
    "tokenizers",
    "rich",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "httpx",
    "gymnasium",
    "numpy",
]


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", *words], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def training(monkeypatch):
    """Replace what `agentrl train` calls; returns a setter for it."""

    def install(function):
        module = types.ModuleType("agentrl.orchestrator.launch")
        module.train = function
        monkeypatch.setitem(sys.modules, "agentrl.orchestrator.launch", module)

    return install


@pytest.fixture
def train_flags(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return ["train", "--env", "search", "--hf-checkpoint", str(tmp_path)]


@pytest.mark.parametrize("words", [["--help"], ["-h"], [], ["help"]])
def test_help_lists_every_command(words, capsys):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: agentrl " + command)


def test_train_help_shows_groups_flags_and_defaults(capsys):
    cli.main(["train", "--env", "search", "--help"])
    out = capsys.readouterr().out
    for part in (
        "Training loop and batch:",
        "--rollout-batch-size INT",
        "--[no-]tensorboard",
        "default 32",
        "--sglang-NAME VALUE",
        "--config FILE",
    ):
        assert part in out


@pytest.mark.parametrize(
    "words",
    [["--help"], *([command, "--help"] for command in ("train", "eval", "convert", "serve-retriever")), ["version"]],
)
def test_help_imports_nothing_heavy(words):
    code = (
        f"import sys; from agentrl.cli.main import main; assert main({words!r}) == 0;"
        f"loaded = sorted(set({HEAVY!r}) & set(sys.modules)); print(loaded, file=sys.stderr); sys.exit(bool(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_unknown_command_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "Did you mean `agentrl train`?" in capsys.readouterr().err


def test_config_errors_are_one_message_and_exit_code_2():
    done = run("train", "--env", "search", "--lrr", "3")
    assert done.returncode == 2
    assert done.stderr == "error: Unknown flag --lrr. Did you mean --lr?\n"


@pytest.mark.parametrize(("error", "code"), [(CheckpointError("torn"), 3), (StorageError("full"), 4)])
def test_exit_code_follows_the_error(training, train_flags, capsys, error, code):
    def fails(config):
        raise error

    training(fails)
    assert cli.main(train_flags) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_train_gets_the_configuration_and_gives_the_exit_code(training, train_flags):
    seen = []
    training(lambda config: seen.append(config))
    assert cli.main([*train_flags, "--lr", "2e-6"]) == 0
    assert seen[0].lr == 2e-6
    training(lambda config: 7)
    assert cli.main(train_flags) == 7


def test_ctrl_c_ends_with_130(training, train_flags, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    training(interrupted)
    assert cli.main(train_flags) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "hint"),
    [("torch", "agentrl-toolkit[train]"), ("ray.util", "agentrl-toolkit[train]"), ("sglang", "make venv")],
)
def test_a_missing_package_names_the_extra(training, train_flags, capsys, module, hint):
    def needs(config):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    training(needs)
    assert cli.main(train_flags) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and hint in err and "pip install" in err


@pytest.mark.parametrize(("command", "absent", "hint"), [("train", "sglang", "make venv"), ("eval", "", "")])
def test_missing_packages_are_named_before_anything_is_made(command, absent, hint, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in ("torch", absent) else name)
    with pytest.raises(ConfigError, match="agentrl " + command) as caught:
        extras.require(command, ("torch", "sglang", "ray"))
    assert "torch" in str(caught.value) and " ray" not in str(caught.value) and hint in str(caught.value)
    assert "pip install 'agentrl-toolkit[" in str(caught.value)
    extras.require(command, ("sys",) if absent == "sglang" else ("sglang",))


def test_training_without_its_packages_leaves_nothing(train_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert cli.main([*train_flags, "--output-dir", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "torch, megatron.core" in err
    assert not (tmp_path / "run").exists()


def test_defects_keep_their_traceback(training, train_flags):
    def broken(config):
        raise ModuleNotFoundError("No module named 'something_of_the_users'", name="something_of_the_users")

    training(broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main(train_flags)


def test_traceback_of_known_errors_on_request(training, train_flags, capsys, monkeypatch):
    def fails(config):
        raise CheckpointError("torn")

    training(fails)
    monkeypatch.setenv("AGENTRL_TRACEBACK", "1")
    assert cli.main(train_flags) == 3
    assert "Traceback" in capsys.readouterr().err


def test_version_lists_packages(capsys):
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "agentrl" in out and "megatron-core" in out and "python" in out


def test_output_to_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-u", "-m", "agentrl.cli.main", "train", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert done.returncode == 1 and done.stderr == ""


def test_an_error_moves_nothing_in_the_terminal(monkeypatch, capsys):
    def run(argv):
        raise CheckpointError("the server said \x1b[2J\x07 gone\nsecond line")

    monkeypatch.setattr("agentrl.cli.version.run", run)
    assert cli.main(["version"]) == 3
    assert capsys.readouterr().err == "error: the server said \\x1b[2J\\x07 gone\nsecond line\n"
