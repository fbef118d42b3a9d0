"""Sessions for the tests of the sandbox, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.tools.sandbox import Limits, Result, Sandbox, Session, resolve
from agentrl.tools.sandbox.tiers import MARK_ENV

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
