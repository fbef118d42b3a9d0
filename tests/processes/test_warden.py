"""The warden ends what a killed driver leaves, and only that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agentrl.processes.tree import Process, descendants, end_tree, identify, is_running
from agentrl.processes.warden import SCRATCH_ENV, Warden, scratch_folder

DRIVER = textwrap.dedent(
    """
    import subprocess, sys, time
    from agentrl.processes.warden import Warden, scratch_folder
    warden = Warden(temp_dirs=[sys.argv[1]], interval=0.1)
    warden.start()
    scratch = scratch_folder("x-")
    # A child, and a grandchild in a session of its own, both deaf to SIGTERM.
    stubborn = "import signal, time, subprocess; signal.signal(15, signal.SIG_IGN)\\n"
    grandchild = stubborn + "time.sleep(300)"
    child = stubborn + (
        f"p = subprocess.Popen(['{sys.executable}', '-c', {grandchild!r}], start_new_session=True)\\n"
        "print(p.pid, flush=True); time.sleep(300)"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
    print(warden.pid, process.pid, process.stdout.readline().strip(), scratch, flush=True)
    if sys.argv[2] == "orphan":
        time.sleep(4)  # until it was recorded
        process.kill()
        process.wait()
        print("orphaned", flush=True)
    time.sleep(300)
    """
)


def wait_until_gone(procs: list[Process], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while any(is_running(proc) for proc in procs):
        assert time.monotonic() < deadline, procs
        time.sleep(0.05)


@pytest.mark.parametrize("case", ["family", "orphan"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_driver_leaves_nothing(tmp_path: Path, case: str, signum: int) -> None:
    """Also a grandchild whose parent died before, which descends from nobody any more."""
    temp_dir = tmp_path / "scratch"
    temp_dir.mkdir()
    (temp_dir / "file").write_text("x")
    command = [sys.executable, "-c", DRIVER, str(temp_dir), case]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        *pids, scratch = driver.stdout.readline().split()
        procs = [identify(int(pid)) for pid in pids]
        assert all(procs)
        if case == "orphan":
            assert driver.stdout.readline() == "orphaned\n"
        else:
            time.sleep(3)  # until they were recorded
        assert Path(scratch).is_dir()
        driver.send_signal(signum)
        wait_until_gone(procs)
        assert not temp_dir.exists()
        assert not Path(scratch).parent.exists()
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


def test_closing_in_order_ends_what_is_left_and_no_other_process(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    late = tmp_path / "late"
    late.mkdir()
    code = (
        "import subprocess, sys, time\n"
        "from agentrl.processes.warden import Warden\n"
        "with Warden(interval=0.1) as warden:\n"
        f"    warden.add_temp_dir({str(late)!r})\n"
        "    p = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "    time.sleep(0.4)\n"
        "assert p.wait(5) == -15\n"
    )
    try:
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
        assert bystander.poll() is None
        assert not late.exists()
    finally:
        bystander.kill()
        bystander.wait()


def test_costs_no_cpu() -> None:
    with Warden() as warden:
        spent = []
        for _ in range(4):  # the first of them hold its start
            before = _cpu_seconds(warden.pid)
            time.sleep(1)
            spent.append(_cpu_seconds(warden.pid) - before)
        assert min(spent) < 0.03


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_scratch_folders_lie_below_the_run_while_a_warden_is_there() -> None:
    outside = Path(scratch_folder("t-"))
    outside.rmdir()
    with Warden():
        inside = Path(scratch_folder("t-"))
        assert inside.parent == Path(os.environ[SCRATCH_ENV])
    assert not inside.exists()
    assert SCRATCH_ENV not in os.environ


def test_a_recycled_id_is_never_taken_for_the_old_process() -> None:
    process = subprocess.Popen(["sleep", "300"])
    try:
        real = identify(process.pid)
        stale = Process(process.pid)
        stale._ident = (process.pid, real._ident[1] - 1)
        assert not is_running(stale)
        assert end_tree([stale], grace=0) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert identify(process.pid) is None
    assert not is_running(real)
    assert descendants(process.pid) == []


def test_what_was_started_just_before_the_end_is_ended_too() -> None:
    code = textwrap.dedent(
        """
        import subprocess, sys, time
        from agentrl.processes.warden import Warden
        with Warden(interval=30):
            time.sleep(1)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print(child.wait(timeout=20))
        """
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str(-signal.SIGTERM), result.stderr


def test_a_killed_warden_is_replaced_and_knows_all_that_was_said(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
    with Warden(interval=0.1) as warden:
        warden.add_temp_dir(folders[0])
        first = identify(warden.pid)
        first.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while warden.pid == first.pid:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        warden.add_temp_dir(folders[1])
        second = identify(warden.pid)
        assert is_running(second)
    assert not is_running(second)
    assert not any(folder.exists() for folder in folders)


def test_a_warden_that_is_killed_again_and_again_raises_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("agentrl.processes.warden.MAX_SPAWNS", 2)
    folder = tmp_path / "scratch"
    folder.mkdir()
    with Warden() as warden:
        for _ in range(2):
            os.kill(warden.pid, signal.SIGKILL)
            deadline, old = time.monotonic() + 20, warden.pid
            while warden.pid == old and warden._keeper.is_alive():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        warden.add_temp_dir(folder)
    assert not folder.exists()


def test_last_words_are_for_a_driver_that_cannot_speak() -> None:
    code = (
        "import os, sys\nfrom agentrl.processes.warden import Warden\n"
        "with Warden(last_words='go on with --load'):\n"
        "    if sys.argv[1] == 'killed':\n        os.kill(os.getpid(), 9)\n"
    )
    for how, said in (("killed", "go on with --load\n"), ("closed", "")):
        process = subprocess.run([sys.executable, "-c", code, how], stderr=subprocess.PIPE, text=True, timeout=60)
        assert process.stderr == said
