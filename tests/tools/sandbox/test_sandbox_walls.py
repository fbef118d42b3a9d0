"""Code that works against its keeper, and what it cannot reach."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest
from sandbox_sessions import Open, marked, ok, wait_for

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
        body = json.dumps({"value": "forged", "status": "memory", "guards": 1, "error": 3}).encode()
        os.write(101, struct.pack("!I", len(body)) + body)
    """
    result = session.run(textwrap.dedent(forged))
    assert result.value == "forged" and result.error is None and result.status == "ok"
    assert session.run("1 + 1").status in ("ok", "broken", "exited", "timeout")
    session.run("1")
    assert open_process().run("1 + 1").value == "2"


def test_output_streams_that_were_closed_are_there_again(open_session: Open):
    session = open_session()
    session.run("import sys\nsys.stdout.close()\nsys.stderr = None")
    assert ok(session.run("print('again')")) == "again\n"
    # Closing the pipe itself ends the output, and costs no time in waiting for more of it.
    assert session.run("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(0.2)").status in ("ok", "exited")


def test_processes_left_running_end_with_the_call(open_session: Open):
    session = open_session()
    code = """
        import os, subprocess, time
        subprocess.Popen(["sleep", "300"])
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        if os.fork() == 0:  # a daemon: forked twice, in a session of its own, deaf to signals
            os.setsid()
            if os.fork() == 0:
                import signal
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                os.closerange(0, 4096)
                time.sleep(300)
            os._exit(0)
        os.wait()
        'started'
    """
    assert ok(session.run(textwrap.dedent(code))) == "'started'"
    assert wait_for(lambda: not [line for line in marked(session._mark) if "(sleep)" in line])
    pythons = [line for line in marked(session._mark) if "python" in line]
    assert len(pythons) <= 2, "the supervisor and the interpreter"


def test_between_calls_nothing_runs(open_session: Open):
    session = open_session()
    session.run(
        "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()"
    )

    def ticks() -> int:
        return sum(sum(map(int, line.rpartition(")")[2].split()[11:13])) for line in marked(session._mark))

    before = ticks()
    time.sleep(0.4)
    assert ticks() - before <= 2, "a thread that never ends costs nothing while the model thinks"
    assert ok(session.run("threading.active_count()")) == "2", "and goes on with the next call"


def test_the_parent_cannot_be_killed_or_costs_only_its_own_session(open_session: Open):
    session, other = open_session(), open_session()
    other.run("x = 1")
    session.run("x = 1")
    session.run("import os\ntry: os.kill(os.getppid(), 9)\nexcept PermissionError: pass\nimport time; time.sleep(0.2)")
    assert ok(session.run("2 + 2")) == "4"
    assert ok(other.run("x")) == "1"


# -- what only some tiers stop -------------------------------------------------------------------------


def test_what_belongs_to_the_trainer_cannot_be_read(open_session: Open, request, tmp_path: Path):
    if "bare" in request.node.name:
        pytest.skip("an ordinary user on an old kernel: the tier 'process' is no boundary")
    secret = tmp_path / "key.txt"
    secret.write_text("secret-key")
    secret.chmod(0o600)
    session = open_session()
    assert session.run(f"open('{secret}').read()").error is not None
    assert session.run(f"open('/proc/{os.getpid()}/environ').read()").error is not None
    assert session.run(f"import os\nos.kill({os.getpid()}, 0)").error is not None
    assert session.run("open('/etc/passwd').read()").error is not None
    mine = "[open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit()]"
    assert "secret" not in str(session.run(f"import os\n{mine}"))


def test_nothing_is_written_outside_the_folder(open_session: Open, request, tmp_path: Path):
    if "bare" in request.node.name:
        pytest.skip("as above")
    session = open_session()
    outside = ["/etc/x", "/var/tmp/x-agentrl-test", "/dev/x-agentrl-test", "/usr/x", str(tmp_path / "x")]
    for path in outside:
        assert session.run(f"open('{path}', 'w')").error is not None
        assert not Path(path).exists()


def test_no_network(open_session: Open, request):
    if "bare" in request.node.name and os.geteuid() != 0:
        pytest.skip("as above")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        code = f"import socket\nsocket.create_connection({address!r}, timeout=2)"
        assert open_session().run(code).error is not None
