"""Code that works against its keeper, and what it cannot reach."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sandbox_sessions import Open, left, marked, ok, run, wait_for

from agentrl.errors import InfraError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


# -- code that works against its keeper ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("import os\nos._exit(3)", "exit status 3"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal\nos.abort()", "SIGABRT"),
        ("import os\nos.closerange(0, 4096)", ""),
        ("import os\nos.write(101, b'{}' * 100)", ""),
        ("import os\nfor fd in range(3, 130):\n    try: os.write(fd, b'\\xff' * 100)\n    except OSError: pass", ""),
        ("import builtins\nbuiltins.len = builtins.repr = None\n1", ""),
        ("import sys, gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Interpreter': o.run = None", ""),
    ],
)
def test_an_interpreter_that_its_code_broke_is_replaced(open_process: Open, code: str, detail: str):
    session = open_process(timeout=2.0)
    session.run("before = 1")
    result = session.run(code)
    if result.status == "ok":  # it broke only when it was used next
        result = session.run("1")
    assert result.lost and detail in result.detail, result
    assert ok(session.run("1 + 1")) == "2"


def test_a_forged_reply_changes_nothing_but_its_own_result(open_process: Open):
    session = open_process()
    forged = """
        import json, os, struct
        body = json.dumps({"value": "forged", "status": "timeout", "error": 3}).encode()
        os.write(101, struct.pack("!I", len(body)) + body)
    """
    result = run(session, forged)
    assert result.value == "forged" and result.error is None and result.status == "ok"
    assert session.run("1 + 1").status in ("ok", "exited", "timeout")
    session.run("1")
    assert open_process().run("1 + 1").value == "2"


def test_output_streams_that_were_closed_are_there_again(open_session: Open):
    session = open_session()
    session.run("import sys\nsys.stdout.close()\nsys.stderr = None")
    assert ok(session.run("print('again')")) == "again\n"
    # Closing the pipe itself ends the output, and costs no time in waiting for more of it.
    assert session.run("import os\nos.close(1)\nos.close(2)").status in ("ok", "exited")


FILLS_ITS_FOLDER = """
    import os, threading, time
    here = os.getcwd()
    if os.fork() == 0:
        os.setsid()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for n in range(50):
                try:
                    os.makedirs(f"{here}/{n}/{n}", exist_ok=True)
                    open(f"{here}/{n}/x", "w").close()
                except OSError: pass
    os._exit(0)
"""


def test_code_cannot_make_its_episode_a_failure_of_infrastructure(open_session: Open):
    session = open_session()
    for _ in range(3):
        assert run(session, FILLS_ITS_FOLDER).detail == "exit status 0"
        assert ok(session.run("1 + 1")) == "2"


def no_space(**_: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_session_that_fails_after_code_has_run_is_the_episodes(open_process: Open, monkeypatch: pytest.MonkeyPatch):
    session = open_process()
    monkeypatch.setattr("agentrl.sandbox.session.base_python", lambda: "/bin/false")
    monkeypatch.setattr("secrets.token_hex", lambda _: "did-not-start")
    with pytest.raises(InfraError, match="did not start"):
        session.run("1")  # no code has run: nobody's fault
    assert not left("did-not-start")
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.mkdtemp", no_space)
    with pytest.raises(InfraError, match="No space left"):
        session.run("1")
    monkeypatch.undo()
    assert session.run("import os\nos._exit(0)").lost
    monkeypatch.setattr("agentrl.sandbox.session.base_python", lambda: "/bin/false")
    result = session.run("1")
    assert result.status == "exited" and "did not start" in result.detail


def test_the_holder_cannot_be_killed_or_costs_only_its_own_session(open_session: Open):
    session, other = open_session(), open_session()
    other.run("x = 1")
    session.run("x = 1")
    session.run("import os\ntry: os.kill(os.getppid(), 9)\nexcept PermissionError: pass\nimport time; time.sleep(0.2)")
    assert ok(session.run("2 + 2")) == "4"
    assert ok(other.run("x")) == "1"


# -- what a boundary stops; in `process` another user, which needs root, stops some of it ---------------


def test_the_code_never_runs_as_root(open_session: Open, tier: str):
    """Asserted from outside, where ids are those of the machine."""
    session = open_session()
    ok(session.run("import subprocess\nsubprocess.Popen(['sleep', '60'])"))
    assert wait_for(lambda: "sleep" in marked(session.mark).values()), "Popen returns a moment before it is to be seen"
    found = marked(session.mark)
    for pid in found:
        status = Path(f"/proc/{pid}/status").read_text()
        ids = {key: set(status.split(f"{key}:")[1].split("\n")[0].split()) for key in ("Uid", "Gid")}
        if os.geteuid() == 0:
            assert "0" not in ids["Uid"] | ids["Gid"]
        else:
            assert ids["Uid"] == {str(os.geteuid())}
        assert "CapEff:\t0000000000000000" in status or found[pid] == "bwrap"
        assert "NoNewPrivs:\t1" in status or found[pid] == "bwrap", "no program, sudo for one, gives it rights"


def test_sysctls_cannot_be_written(open_bubblewrap: Open):
    code = """
        import os
        writable = []
        for top, _, files in os.walk("/proc/sys"):
            for name in files:
                try: os.close(os.open(f"{top}/{name}", os.O_WRONLY))
                except OSError: continue
                writable.append(name)
        len(list(os.walk("/proc/sys"))) > 5, writable
    """
    assert ok(run(open_bubblewrap(timeout=20, cpu_seconds=20), code)) == "(True, [])"


def walled(tier: str) -> None:
    if tier == "process" and os.geteuid() != 0:
        pytest.skip("promised for root only: an ordinary user's code is that user")


def test_what_belongs_to_the_trainer_cannot_be_read(open_session: Open, tier: str, tmp_path: Path):
    walled(tier)
    secret = tmp_path / "key.txt"
    secret.write_text("secret-key")
    secret.chmod(0o600)
    session = open_session()
    assert session.run(f"open('{secret}').read()").error is not None
    assert session.run(f"open('/proc/{os.getpid()}/environ').read()").error is not None
    mine = "[open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit()]"
    assert "secret" not in str(session.run(f"import os\n{mine}"))


KEYS = """
import ctypes, os, sys
call, keyctl, add_key = ctypes.CDLL(None).syscall, *{{"x86_64": (250, 248), "aarch64": (219, 217)}}[os.uname().machine]
call(keyctl, 1, None)
key = call(add_key, b"user", b"agentrl-test", b"secret", 6, -3)
if key > 0:
    from agentrl.sandbox import Sandbox, Session
    look = "import ctypes; call = ctypes.CDLL(None).syscall; "
    look += f"call({{keyctl}}, 10, -3, b'user', b'agentrl-test', 0), call({{keyctl}}, 11, {{key}}, None, 0)"
    with Session(Sandbox({tier!r})) as session:
        print(session.run(look).value)
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the numbers of the calls are not known")
def test_keys_of_the_trainers_session_are_not_there(tier: str):
    """Those of the kernel (Kerberos tickets, say), which no namespace covers."""
    done = subprocess.run([sys.executable, "-c", KEYS.format(tier=tier)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("(-1, -1)", ""), "the second: a machine on which there are no keys"
    assert done.returncode == 0, done.stderr


def test_other_processes_cannot_be_touched(open_session: Open, tier: str):
    walled(tier)
    session = open_session()
    me, limit = os.getpid(), resource.getrlimit(resource.RLIMIT_NOFILE)
    for touch in (
        f"os.kill({me}, 0)",
        f"resource.prlimit({me}, resource.RLIMIT_NOFILE, (3, 3))",
        f"os.sched_setaffinity({me}, [0])",
        f"os.setpriority(os.PRIO_PROCESS, {me}, 19)",
    ):
        error = session.run(f"import os, resource\n{touch}").error
        assert error and ("PermissionError" in error or "ProcessLookupError" in error), touch
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit


def test_other_processes_are_not_seen(open_bubblewrap: Open):
    session = open_bubblewrap()
    assert ok(session.run("import os\nsorted(int(p) for p in os.listdir('/proc') if p.isdigit())")) == "[1, 2]"


def test_nothing_is_written_outside_the_folder(open_session: Open, tier: str):
    walled(tier)
    session = open_session()
    for path in ("/etc/x", "/usr/x", "/dev/x-agentrl-test", "/proc/sys/kernel/hostname"):
        assert session.run(f"open('{path}', 'w')").error is not None
        assert path.startswith("/proc") or not Path(path).exists()


def test_the_machines_files_are_not_there(open_bubblewrap: Open, tmp_path: Path):
    (tmp_path / "world-readable").write_text("x")
    session = open_bubblewrap()
    for path in ("/etc/passwd", "/home", "/var/tmp", "/sys", str(Path(__file__)), str(tmp_path / "world-readable")):
        assert ok(session.run(f"import os\nos.path.exists({path!r})")) == "False", path


def test_no_network(open_bubblewrap: Open):
    """By none of the ways to reach a listener of this machine, and no name is found."""
    code = """
        import socket
        reached = []
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            for protocol in (0, 262):  # 262: multipath TCP
                try: socket.socket(family, socket.SOCK_STREAM, protocol).connect((host, PORT))
                except OSError: continue
                reached.append((family, protocol))
        for flag in (0, 0x20000000):  # the second: TCP fast open, which connects by sending
            try: socket.socket().sendto(b"x", flag, ("127.0.0.1", PORT))
            except OSError: continue
            reached.append(flag)
        try: socket.socket(socket.AF_UNIX).connect("\\0" + NAME)
        except OSError: pass
        else: reached.append("unix")
        try: reached.append(socket.getaddrinfo("example.org", 80))
        except OSError: pass
        reached, [name for _, name in socket.if_nameindex()]
    """
    name = f"agentrl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + name)
        local.listen()
        code = textwrap.dedent(code).replace("PORT", str(server.getsockname()[1])).replace("NAME", repr(name))
        assert ok(open_bubblewrap().run(code)) == "([], ['lo'])"


def test_installed_packages_cannot_be_read(open_bubblewrap: Open):
    code = """
        import glob, sys
        for top in {sys.base_prefix, "/usr", "/usr/local", "/"}:
            for pattern in ("lib*/python3*/*-packages", "lib*/python3*/*-packages/*"):
                sys.path += glob.glob(f"{top}/{pattern}")
        import pip
    """
    session = open_bubblewrap()
    assert run(session, code).error.endswith("ModuleNotFoundError: No module named 'pip'")
    assert ok(session.run("[p for p in sys.path if p.endswith('-packages') and glob.glob(p + '/*')]")) == "[]"
