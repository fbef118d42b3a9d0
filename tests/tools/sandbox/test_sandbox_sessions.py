"""What a call gives, and how a session ends."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sandbox_sessions import VARIANTS, Open, marked, ok, wait_for, works

from agentrl.errors import InfraError
from agentrl.tools.sandbox import Session

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


def test_a_forgotten_session_ends_by_itself(open_session: Open):
    session = Session(open_session().sandbox)
    session.run("1")
    mark = session._mark
    assert marked(mark)
    del session
    gc.collect()
    assert wait_for(lambda: not marked(mark))


OWNER = """
import os, sys
from agentrl.tools.sandbox import Limits, Sandbox, Session
session = Session(Sandbox(**{variant!r}, limits=Limits(timeout=60, cpu_seconds=60)))
session.run('''
import os, subprocess, time
open('f', 'w').write('x')
if os.fork() == 0:
    os.setsid()
''')
print(session._mark, flush=True)
session.run('''
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
subprocess.Popen(["sleep", "300"], start_new_session=True)
print("running", flush=True)
time.sleep(300)
''')
"""


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_nothing_outlives_an_owner_that_was_killed(variant: str):
    if variant == "bubblewrap" and not works("bubblewrap"):
        pytest.skip("bubblewrap does not work here")
    program = OWNER.format(variant=VARIANTS[variant])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        mark = owner.stdout.readline().strip()
        assert wait_for(lambda: any("(sleep)" in line for line in marked(mark))), "the code runs"
        owner.kill()
    assert wait_for(lambda: not marked(mark)), marked(mark)
    assert wait_for(lambda: not list(Path("/tmp").glob(f"*{mark}*")))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_supervisor_that_was_ended_takes_nothing_with_it_into_the_next_call(open_session: Open, signum: int):
    session = open_session()
    session.run("import subprocess\nx = 1")
    mark = session._mark
    os.kill(session.pid, signum)
    result = session.run("x")
    assert result.lost
    assert wait_for(lambda: not marked(mark))
    assert not [place for place in ("/tmp", "/var/tmp", "/dev/shm") if list(Path(place).glob(f"*{mark}*"))]
    assert ok(session.run("1 + 1")) == "2"


def test_folders_of_others_keep_their_modes(open_session: Open):
    places = [place for place in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(place)]
    before = [stat.S_IMODE(os.stat(place).st_mode) for place in places]
    session = open_session(timeout=0.5)
    session.run("while True: pass")
    session.run("import os\nos.symlink('/tmp', 'link')")
    session.close()
    assert [stat.S_IMODE(os.stat(place).st_mode) for place in places] == before


def test_a_forked_copy_gets_an_interpreter_of_its_own():
    program = """
import os
from agentrl.tools.sandbox import Sandbox, Session
session = Session(Sandbox("process"))
session.run("x = 1")
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
