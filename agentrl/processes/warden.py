"""The process that ends a run when the driver no longer can.

A driver that is killed with ``kill -9`` cannot clean up, and its servers and workers live in sessions
of their own. So a run starts a warden: a small process (standard library only) that holds one end of
a pipe. While the driver lives, the warden records the driver's descendants about once a second, by
process id *and* start time, so that a recycled id is never taken for an old process. When the pipe
closes, for whatever reason, it ends every recorded process that is still alive, removes the
temporary folders it was told of, and goes. The driver in turn notices when the warden is killed and
starts another.

A descendant that was started and orphaned within one recording interval can escape; servers of this
project also ask the kernel to die with their parent, which covers them.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

SCRATCH_ENV = "AGENTRL_TMPDIR"
MAX_SPAWNS = 10
"""Wardens of one run: whoever ends more of them than this means it."""


def scratch_folder(prefix: str) -> str:
    """A new private temporary folder, below the run's own where a :class:`Warden` has made one.

    The path is short: Unix sockets live in it, and their paths have 107 characters.
    """
    root = os.environ.get(SCRATCH_ENV)
    if root:
        os.makedirs(root, mode=0o700, exist_ok=True)
    return tempfile.mkdtemp(prefix=prefix, dir=root or None)


class Proc(NamedTuple):
    """A process by id and start time (clock ticks since boot), which together are unique."""

    pid: int
    start: int


def _read_stat(pid: int) -> tuple[int, int, str] | None:
    """Parent id, start time and state of a process; ``None`` if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), int(fields[19]), fields[0].decode()


def identify(pid: int) -> Proc | None:
    """The process with this id, or ``None`` if there is none."""
    stat = _read_stat(pid)
    return Proc(pid, stat[1]) if stat else None


def is_running(proc: Proc) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    stat = _read_stat(proc.pid)
    return stat is not None and stat[1] == proc.start and stat[2] not in "ZX"


def descendants(pid: int, *, include_root: bool = True) -> list[Proc]:
    """The process and all that descend from it, parents before children.

    Reads one line of ``/proc`` a process on the machine, about 10 microseconds each.
    """
    children: dict[int, list[Proc]] = {}
    root = None
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        stat = _read_stat(int(entry))
        if stat is None:
            continue
        proc = Proc(int(entry), stat[1])
        if proc.pid == pid:
            root = proc
        children.setdefault(stat[0], []).append(proc)
    found = [root] if include_root and root else []
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), ()):
            found.append(child)
            queue.append(child.pid)
    return found


def send_signal(proc: Proc, signum: int) -> None:
    """Signal this very process; nothing happens if it is gone."""
    if not is_running(proc):
        return
    try:
        os.kill(proc.pid, signum)
    except ProcessLookupError:
        return


def end_processes(
    procs: Iterable[Proc],
    *,
    term_timeout: float = 5.0,
    kill_timeout: float = 5.0,
    rescan: Callable[[], Iterable[Proc]] | None = None,
) -> list[Proc]:
    """End processes: SIGTERM to all, then SIGKILL to those left. Returns those that would not go.

    Args:
        procs: what to end.
        term_timeout: seconds to wait after SIGTERM; 0 goes straight to SIGKILL.
        kill_timeout: seconds to wait after SIGKILL.
        rescan: called before SIGKILL, to name processes that were started meanwhile.
    """
    targets = {proc for proc in procs if is_running(proc)}
    if term_timeout > 0:
        for proc in targets:
            send_signal(proc, signal.SIGTERM)
        targets = _wait_for_end(targets, term_timeout)
    if rescan is not None:
        targets |= {proc for proc in rescan() if is_running(proc)}
    for proc in targets:
        send_signal(proc, signal.SIGKILL)
    return sorted(_wait_for_end(targets, kill_timeout))


def _wait_for_end(procs: set[Proc], timeout: float) -> set[Proc]:
    deadline = time.monotonic() + timeout
    pause = 0.005
    while True:
        procs = {proc for proc in procs if is_running(proc)}
        if not procs or time.monotonic() >= deadline:
            return procs
        time.sleep(pause)
        pause = min(pause * 2, 0.1)


class Warden:
    """The driver's handle. Use as a context manager, or :meth:`start` and :meth:`close`.

    While it is open, :func:`scratch_folder` of this process and of its children (by the environment
    variable ``AGENTRL_TMPDIR``) makes folders below one that goes with the run.

    Args:
        temp_dirs: folders removed at the end of the run, however it ends.
        interval: seconds between two recordings of the driver's descendants.
        last_words: written to standard error should the driver end without :meth:`close`: it can say nothing then.
    """

    def __init__(
        self, *, temp_dirs: Iterable[str | os.PathLike[str]] = (), interval: float = 1.0, last_words: str = ""
    ):
        self._interval = interval
        self._messages: list[dict[str, object]] = [{"temp_dir": os.fspath(path)} for path in temp_dirs]
        self._messages.append({"last_words": last_words})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._keeper = threading.Thread(target=self._keep, name="agentrl-warden", daemon=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the watcher. The calling process is the one that is watched."""
        scratch = tempfile.mkdtemp(prefix="agentrl-run-")
        self._messages.append({"temp_dir": scratch})
        os.environ[SCRATCH_ENV] = scratch
        with self._lock:
            self._spawn()
        self._keeper.start()

    def add_temp_dir(self, path: str | os.PathLike[str]) -> None:
        """Have one more folder removed at the end of the run."""
        self._send({"temp_dir": os.fspath(path)})

    def add_process(self, pid: int) -> None:
        """Record a process that does not descend from the driver (a Ray worker, say)."""
        proc = identify(pid)
        if proc is not None:
            self._send({"process": list(proc)})

    def close(self, timeout: float = 15.0) -> None:
        """End the watch in order: what is recorded and still alive is ended, folders are removed."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            os.environ.pop(SCRATCH_ENV, None)
            self._write(process, {"last_words": ""})
            process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)
        for message in self._messages:  # where it was killed at the very end
            if "temp_dir" in message:
                remove(str(message["temp_dir"]))

    def _spawn(self) -> None:
        """A process that knows all that was said so far."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(self._interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
            bufsize=0,
        )
        for message in self._messages:
            self._write(self._process, message)

    def _keep(self) -> None:
        """Put another in the place of one that ended while it was needed."""
        for number in range(1, MAX_SPAWNS + 1):
            process = self._process
            if process is None:  # closed already
                return
            process.wait()
            with self._lock:
                if self._process is not process:
                    return
                try:
                    if number == MAX_SPAWNS:
                        raise OSError(f"it was ended {number} times")
                    self._spawn()
                except OSError as error:
                    log().error("the warden was ended; should this process be killed, nothing cleans up: %s", error)
                    return
            log().warning("the warden (process %d) was ended from outside; another takes its place", process.pid)

    def _send(self, message: dict[str, object]) -> None:
        with self._lock:
            self._messages.append(message)
            if self._process is not None:
                self._write(self._process, message)

    @staticmethod
    def _write(process: subprocess.Popen[bytes], message: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; the next one is told all
            process.stdin.write(json.dumps(message).encode() + b"\n")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def log() -> Any:
    """The log, imported when there is something to say: the warden's own process needs none."""
    import logging

    return logging.getLogger("agentrl.processes.warden")


def watch(driver_pid: int, interval: float, pipe: int = 0) -> None:
    """The warden's own loop: record descendants until ``pipe`` closes, then end them."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    me = os.getpid()
    recorded: set[Proc] = set()
    temp_dirs: list[str] = []
    last_words = ""
    buffer = b""
    while True:
        recorded = {proc for proc in recorded if is_running(proc)}
        recorded.update(proc for proc in descendants(driver_pid, include_root=False) if proc.pid != me)
        # Orphans keep their own children: follow those too.
        readable, _, _ = select.select([pipe], [], [], interval)
        if not readable:
            continue
        data = os.read(pipe, 65536)
        if not data:
            # A driver that ends in order is still there: what it started since the last recording counts too.
            recorded.update(proc for proc in descendants(driver_pid, include_root=False) if proc.pid != me)
            break
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "temp_dir" in message:
                temp_dirs.append(message["temp_dir"])
            if "process" in message:
                recorded.add(Proc(*message["process"]))
            last_words = message.get("last_words", last_words)
    _clean_up(recorded, temp_dirs, me)
    if last_words:
        with contextlib.suppress(OSError):  # the terminal may be gone too
            os.write(2, f"{last_words}\n".encode())


def _clean_up(recorded: set[Proc], temp_dirs: list[str], me: int) -> None:
    def with_children() -> set[Proc]:
        found = set(recorded)
        for proc in recorded:
            if is_running(proc):
                found.update(descendants(proc.pid, include_root=False))
        return {proc for proc in found if proc.pid != me}

    end_processes(with_children(), term_timeout=2.0, rescan=with_children)
    for path in temp_dirs:
        remove(path)


def remove(folder: str) -> None:
    """Remove a temporary folder of a run, and the semaphores that bear its name: they live in shared memory."""
    shutil.rmtree(folder, ignore_errors=True)
    for semaphore in glob.glob(f"/dev/shm/sem.{glob.escape(os.path.basename(folder))}-*"):
        with contextlib.suppress(OSError):
            os.unlink(semaphore)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
