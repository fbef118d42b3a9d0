"""Which tier is taken, and what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_sessions import marked, ok, wait_for

from agentrl.errors import ConfigError
from agentrl.tools.sandbox import Limits, Sandbox, Session, resolve
from agentrl.tools.sandbox import tiers as tiers_module

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def test_auto_is_bubblewrap_where_it_works_else_process(monkeypatch: pytest.MonkeyPatch, caplog):
    for failure, tier in ((None, "bubblewrap"), ("no user namespaces", "process")):
        tiers_module._best.cache_clear()
        monkeypatch.setattr(tiers_module, "bubblewrap_failure", lambda failure=failure: failure)
        assert resolve("auto") == tier
    assert "no security boundary" in caplog.text and "no user namespaces" in caplog.text
    tiers_module._best.cache_clear()


def test_a_tier_that_does_not_work_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(ConfigError, match="unknown sandbox tier 'docker'; expected one of auto, process"):
        resolve("docker")
    monkeypatch.setenv("AGENTRL_BWRAP", "/no/such/bwrap")
    tiers_module.bubblewrap_failure.cache_clear()
    with pytest.raises(ConfigError, match="no/such/bwrap"):
        resolve("bubblewrap")
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("AGENTRL_BWRAP", str(fake))
    tiers_module.bubblewrap_failure.cache_clear()
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        resolve("bubblewrap")
    tiers_module.bubblewrap_failure.cache_clear()
    tiers_module.find_runtime.cache_clear()
    monkeypatch.setenv("AGENTRL_CONTAINER_RUNTIME", "no-such-runtime")
    with pytest.raises(ConfigError, match="no container runtime answers"):
        resolve("container", "python:3.12")
    tiers_module.find_runtime.cache_clear()


@pytest.mark.parametrize(
    "limits", [{"timeout": 0}, {"timeout": float("nan")}, {"memory_mb": 1}, {"max_files": "3"}, {"max_processes": True}]
)
def test_impossible_limits_are_refused(limits: dict):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)


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
    settings = Sandbox("container", Limits(memory_mb=300, max_processes=9), image="mine").settings("abc", 1)
    command = settings["command"]
    wanted = ["--network=none", "--read-only", "--memory=300m", "--memory-swap=300m", "--pids-limit=9", "--pull=never"]
    wanted += ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=65534:65534", "--rm", "--interactive"]
    assert set(wanted) <= set(command) and command.index("mine") > max(command.index(word) for word in wanted)
    assert settings["stop_command"] == ["/usr/bin/podman", "rm", "--force", "agentrl-python-abc"]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_sessions_through_a_container_runtime(runtime: Path):
    assert resolve("container", "mine") == "container"
    with Session(Sandbox("container", Limits(timeout=3, cpu_seconds=1), image="mine")) as session:
        assert ok(session.run("x = 6\nimport os\nos.getpid()")) == "1", "the first process of its container"
        for number in range(5):  # output and replies travel apart, and are put together again
            result = session.run(f"print('line {number}')\nx * {number}")
            assert (result.output, result.value, result.cut) == (f"line {number}\n", str(6 * number), 0)
        left = "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\nNone"
        assert ok(session.run(left)) == ""
        assert ok(session.run("os.path.exists(f'/proc/{child.pid}') and child.poll()")) != "None", "it has ended"
        slow = session.run("while True: pass")
        assert (slow.status, slow.detail) in (("exited", "SIGXCPU"), ("cpu", "")), slow
        assert "NameError" in session.run("x").error
        mark = session._mark
    assert f"rm agentrl-python-{mark}" in (runtime / "asked.txt").read_text().splitlines()
    assert wait_for(lambda: not marked(mark))
