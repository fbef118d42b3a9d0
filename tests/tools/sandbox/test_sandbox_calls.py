"""System calls that the model's code is refused, and the memory and files that would go uncounted by them."""

from __future__ import annotations

import errno
import struct
import sys
import textwrap

import pytest
from sandbox_sessions import Open, expect_lost, ok

from agentrl.tools.sandbox.isolated import syscalls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
known = pytest.mark.skipif(sys.platform != "linux" or syscalls.program() is None, reason="no filter for this machine")

ALLOWED, REFUSED, MISSING = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def decide(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel's machine makes of a system call."""
    data = struct.pack("=IIQQ", number, architecture, 0, argument) + bytes(40)
    steps = list(struct.iter_unpack("=HBBI", program))
    at = loaded = 0
    while True:
        code, yes, no, value = steps[at]
        if code == 0x06:
            return value
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
            at += 1
            continue
        holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
        at += 1 + (yes if holds else no)


@pytest.mark.parametrize(
    ("machine", "architecture", "read", "memfd_create", "clone"),
    [("x86_64", X86, 0, 319, 56), ("aarch64", ARM, 63, 279, 220)],
)
def test_the_filter_decides_as_it_should(machine, architecture, read, memfd_create, clone):
    program = syscalls.program(machine)
    assert decide(program, architecture, read) == ALLOWED
    assert decide(program, architecture, memfd_create) == REFUSED
    assert decide(program, architecture, clone, 0x01200011) == ALLOWED, "what fork makes"
    assert decide(program, architecture, clone, 0x10000011) == REFUSED, "a user namespace"
    assert decide(program, architecture, 435) == MISSING, "clone3, after which libraries take clone"
    assert decide(program, architecture, 0x40000000 | memfd_create) == REFUSED
    assert decide(program, I386, read) == REFUSED


def test_machines_that_are_not_known_have_no_filter():
    assert syscalls.program("riscv64") is None


@known
def test_calls_are_refused_and_what_programs_need_is_not(open_session: Open):
    session = open_session()
    code = """
        import ctypes, os, subprocess, threading
        libc = ctypes.CDLL(None)
        refused = [libc.unshare(0x10000000), libc.ptrace(0, 0, 0, 0), libc.shmget(0, 4096, 0o600)]
        try: os.memfd_create("x")
        except PermissionError: refused.append(-1)
        thread = threading.Thread(target=print, args=("thread",))
        thread.start(), thread.join()
        subprocess.run(["echo", "program"])
        if os.fork() == 0: os._exit(0)
        os.wait()
        refused
    """
    result = session.run(textwrap.dedent(code))
    assert (result.value, result.error) == ("[-1, -1, -1, -1]", None)
    assert sorted(result.output.split()) == ["program", "thread"]


SHARED = """
import mmap, os, time
def fill(megabytes):
    memory = mmap.mmap(-1, megabytes << 20)
    for _ in range(megabytes): memory.write(bytes(1 << 20))
    return memory
"""


def test_memory_that_processes_share_counts(open_session: Open):
    session = open_session(memory_mb=128, cpu_seconds=30, timeout=10.0)
    session.run(SHARED)
    expect_lost(
        session, SHARED + "for _ in range(5):\n    if os.fork() == 0: fill(60), time.sleep(30)\nos.wait()", "memory"
    )


def test_shared_memory_counts_once(open_session: Open):
    code = (
        SHARED
        + """
memory = fill(90)
for _ in range(4):
    if os.fork() == 0:
        sum(memory[i] for i in range(0, len(memory), 4096)), time.sleep(0.5), os._exit(0)
for _ in range(4): os.wait()
"ended"
"""
    )
    assert ok(open_session(memory_mb=200, cpu_seconds=30, timeout=10.0).run(code)) == "'ended'"


def test_files_without_a_name_count(open_session: Open):
    session = open_session(max_disk_mb=20, timeout=5.0)
    assert ok(session.run("import tempfile\nf = tempfile.TemporaryFile()\nf.write(bytes(15 << 20))")) == str(15 << 20)
    more = "import os, time\nfiles = []\nfor _ in range(4):\n    f = open('x', 'wb', 0); f.write(bytes(10 << 20))\n"
    result = session.run(more + "    os.unlink('x'); files.append(f)\ntime.sleep(3)")
    assert result.status == "disk" or "No space left" in result.error
