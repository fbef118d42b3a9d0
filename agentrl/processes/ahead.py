"""Servers started ahead of their owner: while a run still starts, they import what they need, then wait for arguments.

Most of a server's start is imports, and its owner, an actor of Ray's, is there seconds after the run began. So the run
itself starts the process (:func:`servers_ahead`), and the owner hands it what it would have given a process of its own
(:func:`hand_over`): arguments, variables, log file. From then on the server dies with that owner as well, by the
connection between them: when the kernel closes it, the kernel kills the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait as readable
from pathlib import Path

from agentrl.processes.warden import scratch_folder

AHEAD_ENV = "AGENTRL_AHEAD"
"""The folder of the sockets on which servers wait."""


def kind_of(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Servers of one kind can stand for each other until they have their arguments."""
    described = json.dumps([module, list(arguments), sorted(environment.items())])
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


def python_environment() -> dict[str, str]:
    """Variables with which a Python of a run finds this package and writes its log at once."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def servers_ahead(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], number: int, *, log_dir: Path
) -> Iterator[None]:
    """Within, so many servers of a kind wait for owners, in this process's tree. Those left over end with it.

    Args:
        module: run as ``python -m module --ahead DESCRIPTOR *arguments``.
        environment: variables that a server of this kind gets besides the owner's.
        log_dir: where each writes until it is handed over: ``ahead-<n>.log``.
    """
    folder = Path(scratch_folder("ahead-"))
    kind, processes = kind_of(module, arguments, environment), []
    before = os.environ.get(AHEAD_ENV)
    lifeline, held = os.pipe()  # its end tells those that wait that this process is gone
    try:
        for index in range(number):
            # Made here, so that an owner can hand over at once, whatever the server is importing.
            with socket.socket(socket.AF_UNIX) as listener, open(log_dir / f"ahead-{index}.log", "ab") as log:
                listener.bind(str(folder / "new"))
                listener.listen(8)
                process = subprocess.Popen(
                    [sys.executable, "-m", module, "--ahead", str(listener.fileno()), *arguments],
                    stdin=lifeline,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **python_environment(), **environment},
                    start_new_session=True,
                    pass_fds=[listener.fileno()],
                )
            (folder / "new").rename(folder / f"{kind}-{process.pid}")
            processes.append(process)
            threading.Thread(target=process.wait, name="agentrl-ahead", daemon=True).start()  # leaves no zombie
        os.environ[AHEAD_ENV] = str(folder)
        yield
    finally:
        os.environ.pop(AHEAD_ENV, None)
        if before is not None:
            os.environ[AHEAD_ENV] = before
        for process in processes:
            process.kill()
        os.close(lifeline)
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)


class Arguments:
    """In a server started ahead: where it waits to be told what to serve.

    Args:
        descriptor: of its listening socket.
    """

    def __init__(self, descriptor: str) -> None:
        self._listener = socket.socket(fileno=int(descriptor))

    def wait(self) -> list[str]:
        """Wait for the owner. This process then has its variables, log and arguments, and dies with it.
        Raises SystemExit: the process that started this one is gone."""
        while True:
            if self._listener not in readable([self._listener, sys.stdin.fileno()]):
                raise SystemExit(0)
            connection, _ = self._listener.accept()
            with connection.makefile("rb") as lines:
                line = lines.readline()
            if line.endswith(b"\n"):
                break
            connection.close()  # another server was taken
        given = json.loads(line)
        os.environ.update(given["environment"])
        tempfile.tempdir = None
        log = os.open(given["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # Nothing more is sent: the next event is the end of the connection.
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1):  # it ended before this
                os.kill(os.getpid(), signal.SIGKILL)
        connection.detach()
        self._listener.close()
        return given["arguments"]


class AheadProcess:
    """A server that was handed over, by the part of ``subprocess.Popen`` that its owner uses. It is not its child.

    How it ended is not known: its return code is then 1.
    """

    def __init__(self, connection: socket.socket, pid: int, fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection  # closed when this object, or this process, is gone
        self._fd = fd

    def poll(self) -> int | None:
        """None while it runs."""
        if self.returncode is None and readable([self._fd], 0):
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            if not readable([self._fd], timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self._ended()
        return self.returncode or 0

    def terminate(self) -> None:
        """SIGTERM, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGTERM)

    def _ended(self) -> None:
        self.returncode = 1
        self._connection.close()

    def __del__(self) -> None:
        os.close(self._fd)


def hand_over(kind: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> AheadProcess | None:
    """Give a waiting server of this kind what it shall do; None where none waits."""
    folder = os.environ.get(AHEAD_ENV)
    request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log.absolute())}
    for path in sorted(Path(folder).glob(f"{kind}-*")) if folder else ():
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            path.unlink()  # whoever removes it has the server
            connection.sendall(json.dumps(request).encode() + b"\n")
            pid = int(path.name.rpartition("-")[2])
            return AheadProcess(connection, pid, os.pidfd_open(pid))
        except OSError:  # it ended, or another was quicker
            connection.close()
    return None
