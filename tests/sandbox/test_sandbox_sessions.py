"""What a call gives, and how a session ends."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from sandbox_sessions import Open, left, marked, ok, run, wait_for

from agentrl.errors import InfraError
from agentrl.sandbox import Sandbox, Session
from agentrl.sandbox.session import Interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def test_state_values_output_and_errors(open_session: Open):
    session = open_session()
    assert session.pid is None, "started by the first call only"
    assert ok(session.run("x = 20\nimport math")) == ""
    assert ok(session.run("def double(n):\n    return 2 * n\ndouble(x) + 2")) == "42"
    assert ok(session.run("_ + 1")) == "43"
    assert ok(session.run("if True:\n    math.floor(2.5)")) == "", "a value inside a statement is not shown"
    result = session.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nNone")
    assert (result.output, result.value) == ("out\nerr\n", None)
    assert ok(session.run("__name__, 'é€😀'")) == "('__main__', 'é€😀')"
    assert ok(session.run("")) == ""


def test_tracebacks_show_the_code_and_no_path_of_this_machine(open_process: Open):
    session = open_process()
    session.run("def f(n):\n    return 1 // n")
    error = session.run("y = 1\nf(0)").error
    assert error == (
        "Traceback (most recent call last):\n"
        "  <code>, line 2, in <module>: f(0)\n"
        "  <code> of an earlier call, line 2, in f: return 1 // n\n"
        "ZeroDivisionError: integer division or modulo by zero"
    )
    assert ok(session.run("y")) == "1", "what ran before the error stays"
    assert "SyntaxError" in session.run("1 +").error
    assert session.run("import json\njson.loads('{')").error.count("\n") == 2, "no frame of the library"
    for code in ("from math import nothing", "open('missing')", "import no_such_module", "\0", "'\ud800'.encode()"):
        error = session.run(code).error
        assert error and sys.prefix not in error and sys.base_prefix not in error and str(Path.home()) not in error
    assert len(session.run("def g(): g()\ng()").error.splitlines()) < 15
    assert len(session.run("raise ValueError('x' * 10**6)").error) < 1200
    assert session.run("class E(Exception):\n    def __str__(self): raise OSError\nraise E").status == "ok"


def test_the_code_has_an_environment_folder_and_input_of_its_own(open_session: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    session = open_session()
    assert "secret-key" not in ok(session.run("import os\nos.environ"))
    assert ok(
        session.run("open('note.txt', 'w').write('abc'), os.path.abspath('note.txt') == os.getcwd() + '/note.txt'")
    )
    assert ok(session.run("open('note.txt').read(), os.listdir()")) == "('abc', ['note.txt'])"
    assert ok(session.run("import tempfile\nlen(tempfile.mkdtemp()) > 0")) == "True"
    assert "EOFError" in session.run("input()").error
    assert ok(session.run("[hash('a') == hash('a'), sorted({'b', 'a', 'c'})]"))
    assert ok(session.run("import subprocess\nsubprocess.run(['echo', 'hello']).returncode")) == "0"


def test_sets_of_text_have_one_order_in_every_session(open_process: Open):
    code = "list({'alpha', 'beta', 'gamma', 'delta', 'epsilon'})"
    assert open_process().run(code) == open_process().run(code)


def test_the_standard_library_is_there_and_packages_only_when_asked_for(open_session: Open):
    names = "itertools, fractions, statistics, decimal, csv, sqlite3, encodings.idna, concurrent.futures"
    session = open_session()
    assert ok(session.run(f"import {names}\nfractions.Fraction(1, 3)")) == "Fraction(1, 3)"
    assert "ModuleNotFoundError" in session.run("import numpy").error
    assert "ModuleNotFoundError" in session.run("import agentrl").error
    rich = open_session(packages=True, memory_mb=1024, timeout=20, cpu_seconds=20)
    assert ok(rich.run("import numpy\nint(numpy.arange(4).sum())")) == "6"


def test_a_fork_that_runs_to_the_end_of_the_code_does_not_answer_for_it(open_session: Open):
    session = open_session()
    code = (
        "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')\n1 if pid else 2"
    )
    result = session.run(code)
    assert (result.output, result.value) == ("child\nparent\n", "1")
    assert ok(session.run("'next'")) == "'next'"


@pytest.mark.parametrize("code", ["import sys\nsys.exit()", "exit(0)", "quit()", "raise SystemExit"])
def test_leaving_in_order_is_no_error_and_keeps_the_state(open_process: Open, code: str):
    session = open_process()
    session.run("kept = 7")
    result = session.run(code)
    assert (result.status, result.error) == ("ok", None)
    assert ok(session.run("kept")) == "7"
    assert session.run("exit('enough')").error == "SystemExit: enough"


# -- the end -------------------------------------------------------------------------------------------


def test_closing_ends_everything_and_may_be_repeated(open_session: Open):
    session = open_session()
    session.run("open('f', 'w').write('x')\nimport os\nos.makedirs('a/b')\nos.chmod('a', 0)")
    session.close()
    session.close()
    with pytest.raises(InfraError, match="closed"):
        session.run("1")


def test_closing_interrupts_a_call(open_process: Open):
    session = open_process(timeout=60, cpu_seconds=60)
    session.run("1")
    raised: list[BaseException] = []

    def call() -> None:
        try:
            session.run("import time\ntime.sleep(60)")
        except InfraError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    session.close()
    thread.join(10)
    assert not thread.is_alive() and "closed" in str(raised[0])


def test_closing_interrupts_a_call_whose_interpreter_still_starts(open_process: Open, monkeypatch: pytest.MonkeyPatch):
    session = open_process(timeout=60, cpu_seconds=60)
    closing = threading.Thread(target=session.close)

    class Starting(Interpreter):
        def __init__(self, sandbox: Sandbox) -> None:
            super().__init__(sandbox)
            closing.start()
            assert wait_for(lambda: session._closed)

    monkeypatch.setattr("agentrl.sandbox.session.Interpreter", Starting)
    with pytest.raises(InfraError, match="closed"):
        session.run("import time\ntime.sleep(60)")
    closing.join(10)
    assert not closing.is_alive() and session.mark is None


def test_a_forgotten_session_ends_by_itself(open_session: Open):
    session = Session(open_session().sandbox)
    session.run("1")
    mark = session.mark
    assert marked(mark)
    del session
    gc.collect()
    assert wait_for(lambda: not marked(mark) and not left(mark))


OWNER = """
from agentrl.sandbox import Limits, Sandbox, Session
session = Session(Sandbox({tier!r}, Limits(timeout=60, cpu_seconds=60)))
session.run("open('f', 'w').write('x')")
print(session.mark, flush=True)
session.run('''
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
subprocess.Popen(["sleep", "300"], start_new_session=True)
time.sleep(300)
''')
"""


def test_nothing_outlives_an_owner_that_was_killed(tier: str):
    with subprocess.Popen([sys.executable, "-c", OWNER.format(tier=tier)], stdout=subprocess.PIPE, text=True) as owner:
        mark = owner.stdout.readline().strip()
        assert wait_for(lambda: "sleep" in marked(mark).values()), "the code runs"
        owner.kill()
    assert wait_for(lambda: not marked(mark) and not left(mark)), marked(mark)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_holder_that_was_ended_takes_its_interpreter_with_it(open_session: Open, signum: int):
    session = open_session()
    session.run("import subprocess\nsubprocess.Popen(['sleep', '300'])")
    mark = session.mark
    os.kill(session.pid, signum)
    assert session.run("import time\ntime.sleep(2)").lost
    assert wait_for(lambda: not marked(mark) and not left(mark))
    assert ok(session.run("1 + 1")) == "2"


THREADS_ONLY = """
    import ctypes, os, platform, threading, time
    if os.fork() == 0:
        os.setsid()
        threading.Thread(target=time.sleep, args=(300,)).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends the first thread only
"""
DAEMON = """
    import os, signal, subprocess, time
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    if os.fork() == 0:  # forked twice, in a session of its own, deaf to signals
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
            os.closerange(0, 4096)
            time.sleep(300)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("code", [THREADS_ONLY, DAEMON], ids=["first thread ended", "daemons"])
def test_all_that_a_session_started_ends_with_it(open_session: Open, tier: str, code: str):
    session = open_session()
    ok(run(session, code))
    mark = session.mark
    own = {"process": 1, "bubblewrap": 3}[tier]
    assert wait_for(lambda: len(marked(mark)) > own), "it runs on between calls"
    session.close()
    assert not marked(mark) and not left(mark)


def test_processes_that_fork_and_go_are_ended_too():
    """Never the same process twice; which of them is there at a moment cannot be asked from outside."""
    program = """
        import os, time
        from agentrl.sandbox import holder
        holder.libc.prctl(holder.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.fork() == 0:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                if os.fork(): os._exit(0)
        assert not holder.reap({})
        holder.end_descendants()
        assert holder.reap({}), "no child, and all whose parent has ended are children"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)


def test_what_a_call_started_is_there_for_the_next(open_session: Open):
    session = open_session()
    session.run("import subprocess\ncat = subprocess.Popen(['cat'], stdin=-1, stdout=-1, text=True)")
    assert ok(session.run("cat.communicate('still here')[0]")) == "'still here'"


def test_folders_of_others_keep_their_modes(open_session: Open):
    places = [place for place in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(place)]
    before = [stat.S_IMODE(os.stat(place).st_mode) for place in places]
    session = open_session(timeout=0.5)
    session.run("while True: pass")
    session.run("import os\nos.symlink('/tmp', 'link')")
    session.close()
    assert [stat.S_IMODE(os.stat(place).st_mode) for place in places] == before


def test_a_process_with_many_open_files_has_sessions():
    program = """
        import os, resource
        from agentrl.sandbox import Sandbox, Session
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if most > 1200:
            for _ in range(1100): os.dup(0)  # `select` takes numbers below 1,024 only
        with Session(Sandbox("process")) as session:
            print(session.run("print('printed', end='')").output)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "printed\n", done.stderr


def test_a_forked_copy_gets_an_interpreter_of_its_own():
    program = """
import os
from agentrl.sandbox import Sandbox, Session
session = Session(Sandbox("process"))
session.run("x = 1")
if os.fork() == 0:
    session.close()
    os._exit(0)
os.wait()
if os.fork() == 0:
    print("child:", session.run("x").error.splitlines()[-1], flush=True)
    session.close()
    os._exit(0)
os.wait()
print("parent:", session.run("x").value)
session.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["child: NameError: name 'x' is not defined", "parent: 1"], done.stderr
