"""Which tier is taken, and what it is told."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_sessions import marked, ok

import agentrl
from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.demo import MODEL_DIR
from agentrl.envs.registry import make_env
from agentrl.errors import ConfigError
from agentrl.sandbox import Limits, Sandbox, Session, resolve
from agentrl.sandbox import tiers as tiers_module
from agentrl.tools import PythonTool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AGENTRL_BWRAP", "/no/such/bwrap")
    tiers_module.failure_of.cache_clear()
    yield
    tiers_module.failure_of.cache_clear()


def test_auto_is_a_boundary_and_never_process(monkeypatch: pytest.MonkeyPatch):
    works: set[str] = {"bubblewrap", "container", "process"}
    monkeypatch.setattr(tiers_module, "failure_of", lambda tier, image: None if tier in works else "not here")
    assert resolve("auto") == "bubblewrap"
    works.remove("bubblewrap")
    assert resolve("auto", "python:3.12") == "container"
    with pytest.raises(ConfigError, match="bubblewrap does not work here: not here"):
        resolve("auto")
    assert resolve("process") == "process"


def test_without_a_boundary_it_is_said_how_to_get_one_before_anything_starts(no_bubblewrap: None, capsys):
    env = agentrl.make("python")
    with pytest.raises(ConfigError) as error:
        env.reset(seed=0)
    for words in ("apt-get install bubblewrap", "docker", "--sandbox process", "/no/such/bwrap", "docs/safety.md"):
        assert words in str(error.value)
    model = ["--hf-checkpoint", str(MODEL_DIR), "--rollout-max-context-len", "2048"]
    assert main(["eval", "--env", "python", *model]) == 2
    assert main(["train", "--env", "python", "--num-rollout", "1"]) == 2
    assert main(["env", "check", "python"]) == 2
    assert capsys.readouterr().err.count("apt-get install bubblewrap") == 3


def test_the_user_says_process_in_any_of_the_places(no_bubblewrap: None, monkeypatch: pytest.MonkeyPatch, capsys):
    assert load_config(["--env", "python", "--sandbox", "process"]).sandbox == "process"

    class Own(agentrl.ToolEnv):
        tools = [PythonTool()]
        tasks = {"train": [("6 * 7 = ?", "42")], "test": [("6 * 8 = ?", "48")]}
        reward = "exact_match"

    said = make_env("python", {}, sandbox="process")
    for env in (said, agentrl.make("python", sandbox="process"), agentrl.make(Own, sandbox="process")):
        env.reset(seed=0)
        code = '<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>'
        assert env.step(code)[0] == "42"
        env.close()
    monkeypatch.setattr(sys, "stdin", io.StringIO("/call python code=40+2\n"))
    assert main(["env", "play", "python", "--sandbox", "process"]) == 0
    assert "42" in capsys.readouterr().out
    assert make_env("textgame", {}, sandbox="process"), "which runs no code"


def test_a_tier_that_does_not_work_says_why(monkeypatch: pytest.MonkeyPatch, no_bubblewrap: None, tmp_path: Path):
    with pytest.raises(ConfigError, match="sandbox is 'docker'; expected one of auto, bubblewrap"):
        resolve("docker")
    with pytest.raises(ConfigError, match="no/such/bwrap"):
        resolve("bubblewrap")
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("AGENTRL_BWRAP", str(fake))
    tiers_module.failure_of.cache_clear()
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        resolve("bubblewrap")
    with pytest.raises(ConfigError, match="needs an image"):
        resolve("container")
    tiers_module.find_runtime.cache_clear()
    monkeypatch.setenv("AGENTRL_CONTAINER_RUNTIME", "no-such-runtime")
    with pytest.raises(ConfigError, match="no container runtime answers"):
        resolve("container", "python:3.12")
    tiers_module.find_runtime.cache_clear()


@pytest.mark.parametrize(
    "limits", [{"timeout": 0}, {"timeout": float("nan")}, {"memory_mb": 1}, {"max_processes": True}]
)
def test_impossible_limits_are_refused(limits: dict):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)


RESOLVE = "import sys; from agentrl.sandbox import resolve; resolve(sys.argv[1])"


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user stays who he is")
@pytest.mark.parametrize("tier", ["process", "bubblewrap"])
def test_a_python_that_is_private_to_root_is_shown_to_the_sandbox_or_refused(tier: str, monkeypatch, tmp_path: Path):
    """Never a reason to run as root."""
    if tier == "bubblewrap" and (failure := tiers_module.failure_of("bubblewrap", None)):
        pytest.skip(f"bubblewrap does not work here: {failure}")
    private = tmp_path / "private" / "python"
    private.mkdir(parents=True)
    (private / "here.txt").write_text("x")
    (tmp_path / "private" / "key.txt").write_text("x")
    (tmp_path / "private").chmod(0o700)
    for place in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        place.chmod(0o755)
    real = tiers_module.python_folders()
    monkeypatch.setattr(tiers_module, "python_folders", lambda: [*real, str(private)])
    with Session(Sandbox(tier)) as session:
        assert ok(session.run(f"import os\nos.getuid() != 0, os.listdir({str(private)!r})")) == "(True, ['here.txt'])"
        assert ok(session.run(f"os.listdir({str(private.parent)!r})")) == "['python']", "nothing else of it"
    without_mounts = [shutil.which("setpriv"), "--bounding-set=-sys_admin", sys.executable, "-c", RESOLVE]
    if without_mounts[0] and tiers_module.closed_to_others(real):
        done = subprocess.run([*without_mounts, tier], capture_output=True, text=True, timeout=60)
        assert "Use a Python that all users can read" in done.stderr, done


def test_in_a_container():
    image = os.environ.get("AGENTRL_TEST_IMAGE")
    if not image:
        pytest.skip("AGENTRL_TEST_IMAGE names no image")
    resolve("container", image)
    with Session(Sandbox("container", Limits(timeout=5), image=image)) as session:
        assert ok(session.run("x = 6\nprint('hi')\nx * 7")) == "42"
        assert session.run("import time\ntime.sleep(60)").status == "timeout"
        assert session.run("import socket\nsocket.create_connection(('1.1.1.1', 80), timeout=2)").error


def test_a_container_is_started_with_every_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers_module, "find_runtime", lambda: "/usr/bin/podman")
    limits = Limits(memory_mb=300, max_processes=9, max_disk_mb=7)
    plan = Sandbox("container", limits, image="mine").plan("abc")
    command = plan["command"]
    wanted = ["--network=none", "--read-only", "--memory=300m", "--memory-swap=300m", "--pids-limit=9", "--pull=never"]
    wanted += ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=65534:65534", "--rm", "--interactive"]
    wanted += ["--tmpfs=/sandbox:size=7m,mode=1777", "--shm-size=7m"]
    assert set(wanted) <= set(command) and command.index("mine") > max(command.index(word) for word in wanted)
    assert plan["stop"] == ["/usr/bin/podman", "rm", "--force", "agentrl-python-abc"]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime that gives containers of the weakest kind; the folder where it writes down what it was asked."""
    namespaces = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "true"]
    if not shutil.which("unshare") or subprocess.run(namespaces, capture_output=True).returncode:
        pytest.skip("no process-id namespaces here")
    shutil.copy(Path(__file__).parent / "fake_runtime.py", tmp_path)
    path = tmp_path / "runtime"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "fake_runtime.py"} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("AGENTRL_CONTAINER_RUNTIME", str(path))
    tiers_module.find_runtime.cache_clear()
    yield tmp_path
    tiers_module.find_runtime.cache_clear()
    tiers_module.failure_of.cache_clear()


def test_sessions_through_a_container_runtime(runtime: Path):
    assert resolve("container", "mine") == "container"
    with Session(Sandbox("container", Limits(timeout=20, cpu_seconds=1), image="mine")) as session:
        assert ok(session.run("x = 6\nimport os\nos.getpid()")) == "1", "the first process of its container"
        for number in range(5):  # output and replies travel apart, and are put together again
            result = session.run(f"print('line {number}')\nx * {number}")
            assert (result.output, result.value, result.cut) == (f"line {number}\n", str(6 * number), 0)
        assert ok(session.run("import subprocess\nsubprocess.Popen(['sleep', '300'])")).startswith("<Popen")
        slow = session.run("while True: pass")
        assert (slow.status, slow.detail) == ("exited", "SIGXCPU")
        assert "NameError" in session.run("x").error
        mark = session.mark
    assert f"rm agentrl-python-{mark}" in (runtime / "asked.txt").read_text().splitlines()
    assert not marked(mark)
