"""Every limit of the sandbox acts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest
from sandbox_sessions import Open, expect_lost, marked, ok, opened, works

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


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


def test_folders_deeper_than_a_path_is_long(open_session: Open):
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('deeper-and-deeper')\n    os.chdir('deeper-and-deeper')"
    session = open_session()
    expect_lost(session, deep, "disk")
    session.run(deep)
    session.close()  # leaves nothing, says the fixture


def test_what_cannot_be_counted_is_too_much(open_process: Open):
    if os.geteuid() == 0:
        pytest.skip("root counts everything")
    expect_lost(open_process(), "import os\nos.mkdir('a')\nos.chmod('a', 0)", "disk")


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


def test_a_fork_bomb_is_ended_before_it_ends_by_itself():
    """Where the kernel does not count processes (root in bubblewrap) the supervisor must be faster than the bomb."""
    if not works("bubblewrap"):
        pytest.skip("bubblewrap does not work here")
    code = """
        import os, time
        end = time.monotonic() + 6
        while time.monotonic() < end:
            try: os.fork()
            except OSError: pass
    """
    with opened("bubblewrap") as open_one:
        session = open_one(max_processes=20, timeout=10.0, cpu_seconds=30)
        session.run("1")
        started = time.monotonic()
        assert session.run(textwrap.dedent(code)).status == "processes"
        assert time.monotonic() - started < 6
        assert ok(session.run("1 + 1")) == "2"


def test_descendants_are_counted_and_ended_in_bounded_time():
    program = """
        import os, time
        from agentrl.tools.sandbox.isolated import confine, tree
        tree_root, (ready, write) = os.getpid(), os.pipe()
        for _ in range(3):  # each the child of the one before
            if os.fork(): break
        else:
            os.write(write, b"x")
        if os.getpid() != tree_root: time.sleep(60)
        os.read(ready, 1)
        assert len(tree.below(tree_root)) == 3
        assert len(tree.below(tree_root, most=1)) == 2
        confine.become_subreaper()
        tree.END_SECONDS = -1.0
        assert tree.end() is False, "late: killed, but nobody waits for it"
        tree.END_SECONDS = 5.0
        assert tree.end() is True
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)


def test_threads_count_as_processes(open_session: Open):
    code = "import threading, time\nfor _ in range(200): threading.Thread(target=time.sleep, args=(30,)).start()"
    result = open_session(max_processes=20, memory_mb=4096).run(code)
    assert result.status == "processes" or result.error.endswith("RuntimeError: can't start new thread")
