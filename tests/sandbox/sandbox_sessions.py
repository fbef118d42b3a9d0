"""Sessions for the tests of the sandbox, and what they leave behind."""

from __future__ import annotations

import contextlib
import glob
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agentrl.sandbox import Limits, Result, Sandbox, Session
from agentrl.sandbox.tiers import MARK_ENV, failure_of

__all__ = ["Open", "expect_lost", "failure_of", "marked", "ok", "opened", "run", "wait_for"]

Open = Callable[..., Session]
QUICK = {"timeout": 3.0, "cpu_seconds": 3}
PLACES = ("/tmp", "/var/tmp", "/dev/shm")


@contextlib.contextmanager
def opened(tier: str) -> Iterator[Open]:
    sessions: list[Session] = []

    def open_one(*, packages: bool = False, **limits: object) -> Session:
        session = Session(Sandbox(tier, packages=packages, limits=Limits(**(QUICK | limits))))
        sessions.append(session)
        return session

    yield open_one
    marks = [session.mark for session in sessions if session.mark]
    for session in sessions:
        session.close()
    for mark in marks:
        assert not marked(mark), "closing waits until all is gone"
        assert not left(mark)


def marked(mark: str) -> dict[int, str]:
    """Name by id of each process of an interpreter that has a thread left, found by what they inherited."""
    found = {}
    wanted = f"{MARK_ENV}={mark}".encode()
    for thread in map(Path, glob.glob("/proc/[0-9]*/task/*")):  # which passes over processes that end meanwhile
        with contextlib.suppress(OSError):
            if mark and wanted in (thread / "environ").read_bytes():
                found[int(thread.parts[2])] = (thread / "comm").read_text().strip()
    return found


def left(mark: str) -> list[Path]:
    """Folders of an interpreter."""
    return [path for place in PLACES for path in Path(place).glob(f"*{mark}*")]


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def run(session: Session, code: str) -> Result:
    return session.run(textwrap.dedent(code))


def ok(result: Result) -> str:
    assert (result.status, result.error) == ("ok", None), result
    return result.value if result.value is not None else result.output


def expect_lost(session: Session, code: str, *statuses: str) -> Result:
    """Runs code that must end its interpreter; the next call must find a new and working one."""
    session.run("before = 1")
    mark = session.mark
    result = run(session, code)
    assert result.status in statuses and result.lost, result
    assert not marked(mark) and not left(mark)
    assert "NameError" in session.run("before").error
    assert ok(session.run("import os\nlen(os.listdir('.'))")) == "0"
    return result
