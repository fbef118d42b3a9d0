"""Trees of processes: found, told to end, waited for. One way for servers, sandboxes, tools' servers and the warden.

A :class:`psutil.Process` is known by its id *and* start time, so that a recycled id is never taken for an old process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil
from psutil import Process

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int | None = None, *, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, however that comes about. Raises
    SystemExit where ``parent`` is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        raise SystemExit("the process that started this one is gone")


def adopt_orphans() -> None:
    """From now on a descendant of this process whose parent ends is this process's child, and :func:`descendants` sees
    it. It must be reaped then: :func:`reap`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(procs: Iterable[Process]) -> list[Process]:
    """Take the exit status of those that ended and are this process's; the others, which still run."""
    running = []
    for proc in procs:
        if is_running(proc):
            running.append(proc)
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(proc.pid, os.WNOHANG)
    return running


def identify(pid: int) -> Process | None:
    """The process with this id, or ``None`` if there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return Process(pid)
    return None


def is_running(proc: Process) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    try:
        return proc.is_running() and proc.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int, *, include_root: bool = True) -> list[Process]:
    """The process and all that descend from it, parents before children; none where it is gone."""
    root = identify(pid)
    if root is None:
        return []
    try:
        found = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [root, *found] if include_root else found


def end_tree(procs: Iterable[Process], *, grace: float = 5.0, kill_timeout: float = 5.0) -> list[Process]:
    """End processes with all that descend from them. Returns those that would not go.

    Args:
        procs: told to end by SIGTERM; their descendants, who may be theirs to end, are not.
        grace: seconds until they and all their descendants, also those started meanwhile, get SIGKILL; with 0 there is
            no SIGTERM.
        kill_timeout: seconds to wait after that.
    """
    asked = [proc for proc in procs if is_running(proc)]
    targets = _with_descendants(asked)
    if grace > 0:
        for proc in asked:
            _send(proc, signal.SIGTERM)
        targets = _with_descendants(_wait_for_end(targets, grace))
    for proc in targets:
        _send(proc, signal.SIGKILL)
    return sorted(_wait_for_end(targets, kill_timeout), key=lambda proc: proc.pid)


def _with_descendants(procs: Iterable[Process]) -> set[Process]:
    return {each for proc in procs for each in (proc, *descendants(proc.pid, include_root=False))}


def _send(proc: Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        proc.send_signal(signum)


def _wait_for_end(procs: set[Process], timeout: float) -> set[Process]:
    # Not `psutil.wait_procs`: it would take the exit status of children from the `Popen` that waits for it.
    deadline, pause = time.monotonic() + timeout, 0.005
    while (procs := {proc for proc in procs if is_running(proc)}) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return procs
