"""The process that ends a run when the driver no longer can.

A driver that is killed with ``kill -9`` cannot clean up, and its servers and workers live in sessions
of their own. So a run starts a warden: a small process that holds one end of
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
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait as readable
from typing import Self

from agentrl.processes.tree import Process, descendants, end_tree, is_running

log = logging.getLogger(__name__)

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

    def close(self, timeout: float = 15.0) -> None:
        """End the watch in order: what is recorded and still alive is ended, folders are removed."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            os.environ.pop(SCRATCH_ENV, None)
            self._write(process, {"last_words": ""})
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)
        for message in self._messages:  # where it was killed at the very end
            if "temp_dir" in message:
                remove(str(message["temp_dir"]))

    @contextlib.contextmanager
    def scratch(self) -> Iterator[str]:
        """One temporary folder for all that this process and its children put into temporary folders.

        Ray, torch and SGLang each leave something behind in the machine's; here it goes with the run, however
        the run ends.
        """
        folder = tempfile.mkdtemp(prefix="agentrl-")
        self.add_temp_dir(folder)
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"], tempfile.tempdir = folder, None
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
            shutil.rmtree(folder, ignore_errors=True)

    def _spawn(self) -> None:
        """A process that knows all that was said so far."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentrl.processes.warden", str(os.getpid()), str(self._interval)],
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
                    log.error("the warden was ended; should this process be killed, nothing cleans up: %s", error)
                    return
            log.warning("the warden (process %d) was ended from outside; another takes its place", process.pid)

    def _send(self, message: dict[str, object]) -> None:
        with self._lock:
            self._messages.append(message)
            if self._process is not None:
                self._write(self._process, message)

    @staticmethod
    def _write(process: subprocess.Popen[bytes], message: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; the next one is told all
            assert process.stdin is not None  # it was asked for
            process.stdin.write(json.dumps(message).encode() + b"\n")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def watch(driver_pid: int, interval: float, pipe: int = 0) -> None:
    """The warden's own loop: record descendants until ``pipe`` closes, then end them."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    me = os.getpid()
    recorded: set[Process] = set()
    temp_dirs: list[str] = []
    last_words = ""
    buffer = b""
    while True:
        recorded = {proc for proc in recorded if is_running(proc)}
        recorded.update(proc for proc in descendants(driver_pid, include_root=False) if proc.pid != me)
        # Orphans keep their own children: follow those too.
        if not readable([pipe], interval):
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
            last_words = message.get("last_words", last_words)
    orphans = {child for proc in recorded for child in descendants(proc.pid, include_root=False) if is_running(proc)}
    end_tree({proc for proc in recorded | orphans if proc.pid != me}, grace=2.0)
    for path in temp_dirs:
        remove(path)
    if last_words:
        with contextlib.suppress(OSError):  # the terminal may be gone too
            os.write(2, f"{last_words}\n".encode())


def remove(folder: str) -> None:
    """Remove a temporary folder of a run, and the semaphores that bear its name: they live in shared memory."""
    shutil.rmtree(folder, ignore_errors=True)
    for semaphore in glob.glob(f"/dev/shm/sem.{glob.escape(os.path.basename(folder))}-*"):
        with contextlib.suppress(OSError):
            os.unlink(semaphore)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
