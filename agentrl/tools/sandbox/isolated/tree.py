"""The processes below this one: who they are, what they use, and their end.

The supervisor is a *subreaper*: a process whose parent ends becomes its child, so a daemon that forked twice is
still found below it.
"""

from __future__ import annotations

import math
import os
import signal
import stat
import time
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
END_SECONDS = 5.0


class Usage(NamedTuple):
    """What a tree uses: threads of all processes, seconds of CPU so far, bytes of memory that is no file's."""

    threads: int
    cpu: float
    memory: int


def below(root: int, most: float = math.inf) -> list[int]:
    """Ids of the living descendants of a process, parents before children; zombies are left out.

    Stops after ``most``: who forks without end is faster than who counts to the end.
    """
    found: list[int] = []
    queue = [root]
    while queue and len(found) <= most:
        for child in _children(queue.pop()):
            queue.append(child)
            if _fields(child) is not None:
                found.append(child)
    return found


def _children(pid: int) -> list[int]:
    """The kernel's own list, per thread; where it has none, all processes are looked through."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listed:
                found += map(int, listed.read().split())
    except FileNotFoundError:
        if os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
            return found  # it ended meanwhile
        return [child for child in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(child) == pid]
    except ProcessLookupError:
        return found
    return found


def _fields(pid: int) -> list[bytes] | None:
    """``/proc/PID/stat`` from the state on; ``None`` for a process that is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as line:
            fields = line.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else fields


def _parent(pid: int) -> int | None:
    fields = _fields(pid)
    return int(fields[1]) if fields else None


def usage(pids: list[int], memory_limit: float = math.inf) -> Usage:
    """What these processes use together, with the CPU time of their children that ended.

    Memory that processes share is looked at only where it may decide whether they are over ``memory_limit`` bytes.
    """
    threads, ticks, own, all_of_it = 0, 0, 0, 0
    for pid in pids:
        fields = _fields(pid)
        if fields is None:
            continue
        threads += int(fields[17])
        ticks += sum(int(field) for field in fields[11:15])
        try:
            with open(f"/proc/{pid}/statm", "rb") as statm:
                _, resident, shared, *_ = map(int, statm.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        own += max(resident - shared, 0)
        all_of_it += resident
    memory = own * _PAGE
    if memory <= memory_limit < all_of_it * _PAGE:
        memory += sum(map(_shared_memory, pids))
    times = os.times()  # what was reaped here counts as well
    return Usage(threads, ticks / _TICKS + times.children_user + times.children_system, memory)


def _shared_memory(pid: int) -> int:
    """Bytes of memory without a file that a process shares: its part of them, or all where that is not told."""
    for file, key in (("smaps_rollup", b"Pss_Shmem:"), ("status", b"RssShmem:")):
        try:
            with open(f"/proc/{pid}/{file}", "rb") as lines:
                found = next((line for line in lines if line.startswith(key)), None)
        except (FileNotFoundError, ProcessLookupError):
            return 0
        except PermissionError:
            continue
        if found is not None:
            return int(found.split()[1]) * 1024
    return 0


def unlinked(pids: list[int]) -> int:
    """Bytes on disk of files that have no name any more and that these processes hold open."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            for fd in os.listdir(folder):
                try:
                    state = os.stat(f"{folder}/{fd}")
                except FileNotFoundError:
                    continue  # closed meanwhile
                if stat.S_ISREG(state.st_mode) and state.st_nlink == 0:
                    sizes[state.st_dev, state.st_ino] = state.st_blocks * 512
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended, or is another user's and this one may not look
    return sum(sizes.values())


def send(pids: list[int], signum: int) -> None:
    """Signals each of them; one that is gone is skipped."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue  # another user's by now: then the id is no longer of this tree


def end(keep: frozenset[int] = frozenset()) -> bool:
    """Ends every descendant of this process that is not in ``keep``; whether all of them went.

    All are stopped before the first is killed, so that none forks while others fall.
    """
    me = os.getpid()
    deadline = time.monotonic() + END_SECONDS
    stopped: set[int] = set()
    while True:
        rest = [pid for pid in below(me) if pid not in keep]
        if not rest:
            return True
        new = [pid for pid in rest if pid not in stopped]
        late = time.monotonic() > deadline
        if new and not late:
            send(new, signal.SIGSTOP)
            stopped.update(new)
            continue
        send(rest, signal.SIGKILL)
        reap(keep)
        if late:
            return False
        time.sleep(0.001)


def reap(keep: frozenset[int] = frozenset()) -> None:
    """Collects children that ended, except those in ``keep``, whose exit status is wanted."""
    for child in _children(os.getpid()):
        if child not in keep:
            try:
                os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                continue
