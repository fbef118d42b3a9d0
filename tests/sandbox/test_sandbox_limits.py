"""Every limit that docs/safety.md promises acts, in each tier that it is promised for."""

from __future__ import annotations

import os
import sys

import pytest
from sandbox_sessions import Open, expect_lost, ok, run

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
    assert expect_lost(open_process(timeout=1.0, cpu_seconds=30), code, "timeout").output == "so far\n"


def test_cpu_time_of_a_process(open_session: Open):
    session = open_session(timeout=30, cpu_seconds=1)
    assert expect_lost(session, "while True: pass", "exited").detail == "SIGXCPU"


def test_cpu_time_of_a_process_that_the_code_starts(open_process: Open):
    code = "import os\nif not (child := os.fork()):\n    while True: pass\nos.waitpid(child, 0)[1]"
    assert ok(open_process(timeout=30, cpu_seconds=1).run(code)) == "24"


def test_a_call_does_not_pay_for_those_before(open_process: Open):
    session = open_process(timeout=30, cpu_seconds=1)
    burn = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\n'done'"
    assert [ok(session.run(burn)) for _ in range(2)] == ["'done'"] * 2


def test_memory_of_a_process_is_an_error_that_keeps_the_state(open_session: Open):
    session = open_session(memory_mb=256)
    session.run("kept = 7")
    assert session.run("x = bytearray(10**9)").error.endswith("MemoryError")
    assert session.run("x = []\nwhile True: x.append('x' * 10**6)").error.endswith("MemoryError")
    shared = "import mmap\nmmap.mmap(-1, 10**9)"
    assert "Cannot allocate memory" in session.run(shared).error, "whichever way it is asked for"
    assert ok(session.run("kept")) == "7"


def test_endless_output(open_process: Open):
    session = open_process(max_output=100, timeout=30, cpu_seconds=30)
    result = expect_lost(session, "while True: print('x' * 1000)", "output")
    assert len(result.output) == 100 and result.cut > 1 << 20


def test_a_gigabyte_in_one_print(open_session: Open):
    session = open_session(max_output=100, memory_mb=2048, timeout=30, cpu_seconds=30)
    result = expect_lost(session, "import sys\nfor _ in range(4): sys.stdout.write('y' * (256 << 20))", "output")
    assert len(result.output) == 100


def test_long_output_and_values_are_cut(open_session: Open):
    session = open_session(max_output=50)
    result = session.run("print('é' * 1000)\n'v' * 1000")
    assert result.output == "é" * 50 and result.cut == 2 * 950 + 1
    assert result.value.startswith("'vvv") and len(result.value) < 100 and "952 more characters cut" in result.value
    result = session.run("print('z' * 300_000)")
    assert (result.output, result.cut) == ("z" * 50, 300_001 - 50)
    assert ok(session.run("print('short')")) == "short\n", "the rest of it does not come later"


def test_size_of_a_file(open_session: Open):
    session = open_session(max_file_mb=1)
    result = session.run("f = open('big', 'wb', buffering=0)\nfor _ in range(4): f.write(bytes(1 << 20))")
    assert result.error.endswith("OSError: [Errno 27] File too large")
    assert ok(session.run("import os\nos.path.getsize('big')")) == str(1 << 20)


def test_size_of_all_files(open_bubblewrap: Open):
    """Also of those that get their room without being written, and of those without a name."""
    session = open_bubblewrap(max_file_mb=2, max_disk_mb=4)
    for folder in (".", "/tmp", "/dev/shm"):
        code = f"import os\nfor n in range(6): os.posix_fallocate(os.open('{folder}/%d' % n, 66), 0, 2 << 20)"
        assert "No space left" in session.run(code).error
    nameless = """
        import tempfile
        kept = []
        for _ in range(6):
            kept.append(tempfile.TemporaryFile(buffering=0))
            kept[-1].write(bytes(2 << 20))
    """
    assert "No space left" in run(open_bubblewrap(max_file_mb=2, max_disk_mb=4), nameless).error


def test_nothing_else_can_be_written(open_bubblewrap: Open):
    code = """
        import os
        writable = []
        for top, folders, files in os.walk('/', onerror=None):
            known = ('/proc', '/usr', '/sandbox', '/dev/shm', '/dev/pts')  # the last holds terminals, no files
            folders[:] = [f for f in folders if os.path.join(top, f) not in known]
            writable += [top] if os.access(top, os.W_OK) else []
        sorted(writable)
    """
    assert ok(run(open_bubblewrap(timeout=20), code)) == "[]"


def test_number_of_open_files(open_process: Open):
    error = open_process().run("files = [open('/dev/null') for _ in range(10**4)]").error
    assert error.endswith("OSError: [Errno 24] Too many open files: '/dev/null'")


def exact(tier: str) -> bool:
    """Whether the kernel counts the session's processes alone; as an ordinary user's in ``process`` it does not."""
    return tier == "bubblewrap" or os.geteuid() == 0


@pytest.mark.parametrize("most", [4, 20])
def test_number_of_processes(open_session: Open, tier: str, most: int):
    # Four hundred at most, and children do not fork: a test must not try the machine.
    session = open_session(max_processes=most, timeout=20)
    code = """
        import os, time
        started = 1
        try:
            for _ in range(400):
                if os.fork() == 0: time.sleep(60)
                started += 1
        except BlockingIOError: pass
        started
    """
    started = int(ok(run(session, code)))
    assert started == most if exact(tier) else started < 400
    assert "BlockingIOError" in session.run("os.fork()").error, "they run on, and count, until the session ends"


def test_a_fork_bomb_ends_with_its_session(open_session: Open):
    code = """
        import os, time
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try: os.fork()
            except OSError: time.sleep(0.01)
    """
    expect_lost(open_session(max_processes=20, timeout=1.0, cpu_seconds=30), code, "timeout")


def test_threads_count_as_processes(open_session: Open, tier: str):
    if not exact(tier):
        pytest.skip("the kernel counts all threads of this user together")
    code = "import threading, time\nfor _ in range(50): threading.Thread(target=time.sleep, args=(30,)).start()"
    result = open_session(max_processes=20, memory_mb=4096).run(code)
    assert result.error.endswith("RuntimeError: can't start new thread")
