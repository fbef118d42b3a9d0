"""A supervised command goes on after faults that another start may cure, and after no others."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agentrl.processes import supervisor
from agentrl.processes.supervisor import pause_before
from agentrl.processes.tree import identify, is_running

CHILD = """
import json, os, signal, subprocess, sys, time
folder, load = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
attempt = json.loads(os.environ["AGENTRL_ATTEMPT"])
def tell(**facts):
    os.write(attempt["pipe"], (json.dumps(facts) + "\\n").encode())
far = folder + "/far"
start = int(open(far).read()) if os.path.exists(far) else 0
with open(folder + "/starts", "a") as log:
    log.write(json.dumps([attempt["number"], load, os.getpid()]) + "\\n")
do = json.load(open(folder + "/plan"))[attempt["number"] - 1]
if "early" not in do:
    tell(run=folder, load="the run", start=start, open=True)
if "orphan" in do:
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    open(folder + "/orphan", "w").write(str(child.pid))
if "saves" in do:
    open(far, "w").write(str(do["saves"]))
if "ends" in do:
    def end(number, frame):
        time.sleep(do["ends"])
        open(folder + "/saved", "w").close()
        sys.exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
if "waits" in do:
    try:
        open(folder + "/waiting", "w").close()
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
if "done" in do:
    tell(done=True)
if "kill" in do:
    os.kill(os.getpid(), do["kill"])
if "error" in do:
    tell(error=do["error"])
if "silent" not in do:
    tell(open=False)
sys.exit(do.get("code", 0))
"""
LOST = {"code": 5, "error": "rank 0 died"}


class Supervised:
    """``supervise`` in a process of its own, forked from this one."""

    def __init__(self, folder: Path, *plan: dict, pause: float = 0.0):
        self.folder = folder
        (folder / "child.py").write_text(CHILD)
        (folder / "plan").write_text(json.dumps(plan))
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = self._supervise(pause)
            finally:
                os._exit(code)

    def _supervise(self, pause: float) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout = sys.stderr = (self.folder / "said").open("w", buffering=1)
        supervisor.LEAVING_S, supervisor.ENDING_S = 0.2, 5.0
        far, child = self.folder / "far", [sys.executable, "-IS", str(self.folder / "child.py"), str(self.folder)]
        return supervisor.supervise(
            child,
            lambda load: [*child, load],
            progress=lambda run: int(far.read_text()) if far.exists() else 0,
            limit=2,
            say=print,
            pause=lambda restart: pause,
        )

    def wait(self) -> int:
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(ended[1])

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()


def outcome(folder: Path, *plan: dict) -> tuple[int, list[list], str]:
    """The exit code, the starts (number, what was loaded, process) and what was said."""
    process = Supervised(folder, *plan)
    return process.wait(), starts(folder), process.said


def starts(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


def test_a_run_that_lost_a_part_goes_on_from_its_folder(tmp_path: Path) -> None:
    code, made, said = outcome(tmp_path, {"saves": 6, **LOST}, {"saves": 9, "kill": signal.SIGKILL}, {})
    assert code == 0
    assert [start[:2] for start in made] == [[1, None], [2, "the run"], [3, "the run"]]
    assert "attempt 2, going on from step 6 in 0 s: rank 0 died" in said
    assert "attempt 3, going on from step 9 in 0 s: the driver ended without a word (SIGKILL)" in said


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"code": 1}, 1),  # an error of the author's code
        ({"code": 2}, 2),
        ({"code": 3}, 3),
        ({"code": 4}, 4),
        ({"code": 130}, 130),
        ({"kill": signal.SIGTERM}, 143),
        ({"code": 1, "early": True, "silent": True}, 1),  # it never worked
    ],
)
def test_other_ends_stay_as_they_are(tmp_path: Path, end: dict, code: int) -> None:
    assert outcome(tmp_path, end, {})[:2] == (code, [starts(tmp_path)[0]])


def test_a_library_that_ends_the_process_is_a_fault(tmp_path: Path) -> None:
    assert outcome(tmp_path, {"code": 1, "silent": True}, {})[0] == 0


def test_a_fault_before_there_is_a_folder_begins_anew(tmp_path: Path) -> None:
    code, made, said = outcome(tmp_path, {"early": True, "kill": signal.SIGSEGV}, {})
    assert (code, [start[1] for start in made]) == (0, [None, None])
    assert "beginning again" in said


def test_restarts_in_a_row_without_a_new_checkpoint_are_bounded(tmp_path: Path) -> None:
    code, made, said = outcome(tmp_path, {"saves": 3, **LOST}, LOST, {"saves": 4, **LOST}, LOST, LOST, {})
    assert (code, len(made)) == (5, 5)
    assert "attempt 5, restart 2 of 2 without a new checkpoint, going on from step 4" in said
    assert said.endswith("given up after 2 restarts in a row without a new checkpoint\nerror: rank 0 died\n")


def test_a_run_that_was_done_when_its_process_died_is_done(tmp_path: Path) -> None:
    assert outcome(tmp_path, {"done": True, "kill": signal.SIGKILL}, {})[:2] == (0, [starts(tmp_path)[0]])


def test_nothing_of_an_attempt_outlives_it(tmp_path: Path) -> None:
    code, _, _ = outcome(tmp_path, {"orphan": True, **LOST}, {})
    assert code == 0
    orphan = identify(int((tmp_path / "orphan").read_text()))
    assert orphan is None or not is_running(orphan)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_persons_signal_is_passed_on_and_ends_it(tmp_path: Path, number: int) -> None:
    process = Supervised(tmp_path, {"waits": True, "kill": signal.SIGKILL}, {})
    until((tmp_path / "waiting").exists)
    os.kill(process.pid, number)
    assert process.wait() == 128 + number
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_child_that_was_asked_to_end_has_the_time_to_save(tmp_path: Path, number: int) -> None:
    process = Supervised(tmp_path, {"ends": 0.5, "waits": True}, {})
    until((tmp_path / "waiting").exists)
    os.kill(process.pid, number)
    assert process.wait() == 128 + number
    assert (tmp_path / "saved").exists() and len(starts(tmp_path)) == 1


def test_a_child_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    process = Supervised(tmp_path, {"ends": 60, "waits": True}, {})
    until((tmp_path / "waiting").exists)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGKILL
    assert not (tmp_path / "saved").exists()


def test_a_signal_while_it_waits_for_the_next_start_ends_it(tmp_path: Path) -> None:
    process = Supervised(tmp_path, LOST, {}, pause=60.0)
    until(lambda: (tmp_path / "said").exists() and "attempt 2" in process.said)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 143
    assert len(starts(tmp_path)) == 1


def test_the_child_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    process = Supervised(tmp_path, {"waits": True})
    until((tmp_path / "waiting").exists)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: (child := identify(starts(tmp_path)[0][2])) is None or not is_running(child))


def test_the_child_tells_and_its_own_children_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv(supervisor.ATTEMPT_ENV, json.dumps({"number": 2, "began": 7.0, "pipe": writing}))
    attempt = supervisor.Attempt.of_environment()
    assert attempt is not None and (attempt.number, attempt.began) == (2, 7.0)
    assert supervisor.Attempt.of_environment() is None and not os.get_inheritable(writing)
    attempt.tell(run="a folder", start=3)
    assert json.loads(os.read(reading, 1000)) == {"run": "a folder", "start": 3}
    os.close(reading)
    attempt.tell(done=True)  # to nobody
    os.close(writing)


def test_it_waits_longer_each_time() -> None:
    assert [pause_before(n) for n in (1, 2, 3, 4, 9, 99)] == [1.0, 5.0, 10.0, 20.0, 300.0, 300.0]


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
