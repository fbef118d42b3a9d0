"""Sessions of the Python sandbox, in every tier that works here: what they give, and that every limit acts."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, InfraError
from agentrl.tools.sandbox import Limits, Result, Sandbox, Session, resolve
from agentrl.tools.sandbox import tiers as tiers_module
from agentrl.tools.sandbox.tiers import MARK_ENV

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

Open = Callable[..., Session]

VARIANTS = {
    "process": {"tier": "process"},
    # As an ordinary user on an old kernel has it: nothing but limits and the supervisor.
    "bare": {"tier": "process", "own_user": False, "landlock": False},
    "bubblewrap": {"tier": "bubblewrap"},
}
QUICK = {"timeout": 3.0, "cpu_seconds": 3}


def works(tier: str) -> bool:
    try:
        return resolve(tier) == tier
    except ConfigError:
        return False


@pytest.fixture(params=list(VARIANTS))
def open_session(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens sessions of each variant; they are closed at the end, and nothing of them is left."""
    if request.param == "bubblewrap" and not works("bubblewrap"):
        pytest.skip("bubblewrap does not work here")
    with opened(request.param) as open_one:
        yield open_one


@pytest.fixture
def open_process() -> Iterator[Open]:
    """The same for what is one piece of code in every tier."""
    with opened("process") as open_one:
        yield open_one


@contextlib.contextmanager
def opened(variant: str) -> Iterator[Open]:
    sessions: list[Session] = []

    def open_one(*, packages: bool = False, **limits: object) -> Session:
        session = Session(Sandbox(**VARIANTS[variant], packages=packages, limits=Limits(**(QUICK | limits))))
        sessions.append(session)
        return session

    yield open_one
    marks = [session._mark for session in sessions if session._mark]
    for session in sessions:
        session.close()
    for mark in marks:
        assert wait_for(lambda mark=mark: not marked(mark)), marked(mark)
        assert not [place for place in ("/tmp", "/var/tmp", "/dev/shm") if list(Path(place).glob(f"*{mark}*"))]


def marked(mark: str) -> list[str]:
    """Processes of a session, found by what they inherited."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark and f"{MARK_ENV}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(Path(f"/proc/{name}/stat").read_text())
        except OSError:
            continue
    return [text for text in found if text.rpartition(")")[2].split()[0] not in "ZX"]


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ok(result: Result) -> str:
    assert (result.status, result.error) == ("ok", None), result
    return result.value if result.value is not None else result.output


# -- what a call gives ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("code", ["import sys\nsys.exit()", "exit(0)", "quit()", "raise SystemExit"])
def test_leaving_in_order_is_no_error_and_keeps_the_state(open_process: Open, code: str):
    session = open_process()
    session.run("kept = 7")
    result = session.run(code)
    assert (result.status, result.error) == ("ok", None)
    assert ok(session.run("kept")) == "7"
    assert session.run("exit('enough')").error == "SystemExit: enough"


# -- limits: each of them acts -------------------------------------------------------------------------


def expect_lost(session: Session, code: str, *statuses: str) -> Result:
    """Runs code that must end its interpreter; the next call must find a new and working one."""
    session.run("before = 1")
    started = time.monotonic()
    result = session.run(code)
    assert result.status in statuses and result.lost, result
    assert time.monotonic() - started < 15
    assert "NameError" in session.run("before").error
    assert ok(session.run("import os\nlen(os.listdir('.'))")) == "0"
    return result


def test_wall_time_of_a_loop(open_session: Open):
    expect_lost(open_session(timeout=0.5, cpu_seconds=30), "while True: pass", "timeout")


@pytest.mark.parametrize(
    "code",
    [
        "import time\nprint('so far')\ntime.sleep(60)",
        "print('so far')\n10 ** 10 ** 9",
        "print('so far')\nimport signal\nsignal.pthread_sigmask(0, signal.valid_signals())\nwhile True: pass",
    ],
)
def test_wall_time_of_what_no_signal_wakes(open_process: Open, code: str):
    assert expect_lost(open_process(timeout=0.5, cpu_seconds=30), code, "timeout").output == "so far\n"


def test_cpu_time_of_one_process(open_session: Open):
    result = expect_lost(open_session(timeout=20, cpu_seconds=1), "while True: pass", "cpu", "exited")
    assert result.status == "cpu" or result.detail == "SIGXCPU"


def test_cpu_time_of_many_processes_counts_together(open_session: Open):
    # Each of them alone would stay below the limit, and the kernel's own limit is taken away.
    code = """
        import os, resource
        resource.setrlimit(resource.RLIMIT_CPU, (resource.getrlimit(resource.RLIMIT_CPU)[1],) * 2)
        for _ in range(3):
            if os.fork() == 0:
                while True: pass
        os.wait()
    """
    expect_lost(open_session(timeout=20, cpu_seconds=1), textwrap.dedent(code), "cpu")


def test_a_call_does_not_pay_for_those_before(open_process: Open):
    session = open_process(timeout=20, cpu_seconds=1)
    burn = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\n'done'"
    assert [ok(session.run(burn)) for _ in range(2)] == ["'done'"] * 2


def test_memory_of_one_process_is_an_error_that_keeps_the_state(open_session: Open):
    session = open_session(memory_mb=256)
    session.run("kept = 7")
    assert session.run("x = bytearray(10**9)").error.endswith("MemoryError")
    assert session.run("x = []\nwhile True: x.append('x' * 10**6)").error.endswith("MemoryError")
    assert ok(session.run("kept")) == "7"


def test_memory_of_many_processes_counts_together(open_session: Open):
    code = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                x = bytearray(os.urandom(1)) * (60 << 20)
                time.sleep(30)
        os.wait()
    """
    expect_lost(open_session(memory_mb=160, timeout=20), textwrap.dedent(code), "memory")


def test_endless_output(open_process: Open):
    session = open_process(max_output=100, timeout=30, cpu_seconds=30)
    result = expect_lost(session, "while True: print('x' * 1000)", "output")
    assert len(result.output) == 100 and result.cut > 1 << 20


def test_a_gigabyte_in_one_print(open_session: Open):
    session = open_session(max_output=100, memory_mb=2048, timeout=30, cpu_seconds=30)
    result = expect_lost(session, "import sys\nfor _ in range(4): sys.stdout.write('y' * (256 << 20))", "output")
    assert len(result.output) == 100


def test_long_output_and_values_are_cut(open_process: Open):
    session = open_process(max_output=50)
    result = session.run("print('é' * 1000)\n'v' * 1000")
    assert result.output == "é" * 50 and result.cut == 2 * 950 + 1
    assert result.value.startswith("'vvv") and len(result.value) < 100 and "952 more characters cut" in result.value
    assert ok(session.run("print('short')")) == "short\n", "the rest of it does not come later"


def test_size_of_a_file(open_session: Open):
    session = open_session(max_file_mb=1)
    result = session.run("f = open('big', 'wb', buffering=0)\nfor _ in range(4): f.write(bytes(1 << 20))")
    assert result.error.endswith("OSError: [Errno 27] File too large")
    assert ok(session.run("import os\nos.path.getsize('big')")) == str(1 << 20)


def test_size_of_all_files(open_session: Open):
    session = open_session(max_file_mb=2, max_disk_mb=4)
    result = session.run("for n in range(6): open(f'f{n}', 'wb').write(bytes(2 << 20))")
    assert result.status == "disk" or "No space left" in result.error
    assert ok(session.run("import os\nsum(os.path.getsize(f) for f in os.listdir()) <= 4 << 20")) == "True"


def test_number_of_files(open_session: Open):
    session = open_session(max_files=100)
    expect_lost(session, "import os\nfor n in range(500): os.mkdir(f'd{n}')", "disk")
    code = "import os, time\nfor n in range(10**6):\n    open(f'f{n}', 'w').close()\n    time.sleep(0.001)"
    expect_lost(session, code, "disk")


def test_number_of_open_files(open_process: Open):
    error = open_process().run("files = [open('/dev/null') for _ in range(10**4)]").error
    assert error.endswith("OSError: [Errno 24] Too many open files: '/dev/null'")


def test_fork_bomb(open_session: Open):
    # Four hundred at most, and children do not fork: a test must not try the machine.
    session = open_session(max_processes=20)
    result = session.run("import os, time\nfor _ in range(400):\n    if os.fork() == 0: time.sleep(30)")
    assert result.status == "processes" or "BlockingIOError" in result.error
    assert ok(session.run("1 + 1")) == "2"
    assert len(marked(session._mark)) <= 4, "supervisor, interpreter, and what starts it"


def test_a_fork_bomb_whose_children_fork_ends(open_session: Open):
    code = """
        import os, time
        end = time.monotonic() + 2
        for _ in range(6):  # 64 processes at most
            try: os.fork()
            except OSError: pass
        while time.monotonic() < end: time.sleep(0.1)
    """
    session = open_session(max_processes=20, timeout=1.0)
    result = session.run(textwrap.dedent(code))
    assert result.status in ("processes", "timeout")
    assert ok(session.run("1 + 1")) == "2"
    assert len(marked(session._mark)) <= 4


def test_threads_count_as_processes(open_session: Open):
    code = "import threading, time\nfor _ in range(200): threading.Thread(target=time.sleep, args=(30,)).start()"
    result = open_session(max_processes=20, memory_mb=4096).run(code)
    assert result.status == "processes" or result.error.endswith("RuntimeError: can't start new thread")


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


def test_a_supervisor_that_was_killed_takes_nothing_with_it_into_the_next_call(open_session: Open):
    session = open_session()
    session.run("import os, time\nx = 1")
    mark = session._mark
    os.kill(session.pid, 9)
    result = session.run("x")
    assert result.lost
    assert wait_for(lambda: not marked(mark))
    assert ok(session.run("1 + 1")) == "2"


def test_folders_of_others_keep_their_modes(open_session: Open):
    places = [place for place in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(place)]
    before = [stat.S_IMODE(os.stat(place).st_mode) for place in places]
    session = open_session(timeout=0.5)
    session.run("while True: pass")
    session.run("import os\nos.symlink('/tmp', 'link')")
    session.close()
    assert [stat.S_IMODE(os.stat(place).st_mode) for place in places] == before


# -- tiers ---------------------------------------------------------------------------------------------


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
