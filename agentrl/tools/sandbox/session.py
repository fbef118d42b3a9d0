"""``Session``: one episode's interpreter, as the caller sees it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentrl.errors import InfraError
from agentrl.tools.sandbox.isolated.wire import Reader, WireError, encode
from agentrl.tools.sandbox.isolated.worker import remove_folder
from agentrl.tools.sandbox.tiers import MARK_ENV, START_SECONDS, Sandbox, base_python
from agentrl.warden import Proc, end_processes, identify

GRACE_SECONDS = 15.0
_PACKAGE = Path(__file__).parent
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from isolated.supervisor import main; sys.path.pop(); main()"


@dataclass(frozen=True)
class Result:
    """What a piece of code gave.

    ``status`` is ``ok`` when the interpreter lives on, with ``value`` (the last expression's, as text) or ``error``
    (what was raised). Otherwise it names the limit that ended the interpreter (``timeout``, ``cpu``, ``memory``,
    ``processes``, ``disk``, ``output``), or ``exited`` or ``broken``: then its state is lost.
    """

    status: str
    output: str = ""
    cut: int = 0
    """Bytes of output that are not in ``output``."""
    value: str | None = None
    error: str | None = None
    detail: str = ""
    guards: tuple[str, ...] = ()
    """What the kernel enforced in tier ``process``; see docs/safety.md."""

    @property
    def lost(self) -> bool:
        """Whether variables and files are gone."""
        return self.status != "ok"


class Session:
    """An interpreter that keeps its state from call to call.

    It is started by the first call, and again after a call that ended it. It never outlives its caller, however that
    ends. One call runs at a time.

    Args:
        sandbox: the tier and its limits.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._mark = ""
        self._owner = 0
        self._folder: str | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, if it runs."""
        return self._process.pid if self._process else None

    def run(self, code: str) -> Result:
        """Runs code and waits for its end.

        Raises:
            InfraError: the sandbox itself failed, or the session is closed.
        """
        with self._lock:
            if self._closed:
                raise InfraError("the Python session is closed.")
            if self._socket is not None and self._owner != os.getpid():
                self._abandon()  # this is a forked copy, the session is its parent's
            if self._socket is None:
                self._start()
            try:
                answer = self._ask({"code": code}, self.sandbox.limits.timeout + START_SECONDS + GRACE_SECONDS)
            except (OSError, WireError, EOFError) as error:
                self._abandon()
                if self._closed:
                    raise InfraError("the Python session was closed.") from error
                # It had answered before and runs nothing that fails by itself: the code got at it.
                return Result("exited", detail="it took its own supervision down")
        if answer["status"] == "unavailable":
            raise InfraError(f"the Python sandbox ({self.sandbox.tier}) failed: {answer['detail']}")
        answer["guards"] = tuple(answer["guards"])
        return Result(**answer)

    def close(self) -> None:
        """Ends the interpreter and everything it started. May be called at any time, from any thread."""
        self._closed = True
        self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        self._mark = secrets.token_hex(8)
        ours, theirs = socket.socketpair()
        environment = self.sandbox.environment(self._mark, "/")
        if "LD_LIBRARY_PATH" in os.environ:  # some Pythons do not start without
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        try:
            process = subprocess.Popen(
                [base_python(), "-s", "-S", "-P", "-c", _BOOT, str(_PACKAGE), str(os.getpid())],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise InfraError(f"the Python sandbox cannot be started: {error}") from error
        finally:
            theirs.close()
        self._process, self._socket, self._owner = process, ours, os.getpid()
        self._folder = None
        try:
            settings = self.sandbox.settings(self._mark, process.pid)
            self._folder = settings["folder"]
            self._finalizer = weakref.finalize(self, _end_later, process, ours, self._owner, self._mark, self._folder)
            self._finalizer.atexit = False  # the supervisor sees for itself that its caller ends
            self._ask(settings, START_SECONDS)
            if self._closed:  # while it started
                raise EOFError("the session was closed")
        except (OSError, WireError, EOFError) as error:
            said = self._abandon()
            raise InfraError(f"the Python sandbox did not start: {error}. {said}") from error
        except BaseException:
            self._abandon()
            raise

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Raises OSError, EOFError or WireError when there is no answer in time."""
        ours = self._socket
        if ours is None:
            raise EOFError("the session was closed")
        deadline = time.monotonic() + seconds
        ours.settimeout(seconds)
        ours.sendall(encode(message))
        reader = Reader(64 * self.sandbox.limits.max_output + (1 << 20))
        while True:
            ours.settimeout(max(deadline - time.monotonic(), 0.001))
            data = ours.recv(1 << 16)
            if not data:
                raise EOFError("the supervisor is gone")
            answer = reader.feed(data)
            if answer is not None:
                return answer

    def _abandon(self) -> str:
        """Ends the supervisor and all that it has; what it said last."""
        with self._ending:  # the caller may close while a call fails
            process, ours, self._process, self._socket = self._process, self._socket, None, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if process is None or ours is None:
            return ""
        return _end(process, ours, self._owner, self._mark, self._folder)


def _end_later(*session: Any) -> None:
    """For the garbage collector, which must not wait."""
    threading.Thread(target=_end, args=session, daemon=True).start()


def _end(process: subprocess.Popen[bytes], ours: socket.socket, caller: int, mark: str, folder: str | None) -> str:
    """Has the supervisor end everything; does it here if the supervisor cannot. Returns its last words."""
    assert process.stderr is not None
    if os.getpid() != caller:  # a forked copy: the session is its parent's
        ours.close()
        process.stderr.close()
        process.returncode = 0  # for `Popen`, which would report a child that is none of this process
        return ""
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)  # wakes who waits for an answer
    try:
        status = process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait(timeout=GRACE_SECONDS)
    ours.close()
    if status != 0:
        _clear(mark)
        remove_folder(folder)
    with process.stderr as said:
        return said.read().decode(errors="replace")[-2000:]


def _clear(mark: str) -> None:
    """Ends the processes of a session whose supervisor did not."""

    def marked() -> list[Proc]:
        found = []
        wanted = f"{MARK_ENV}={mark}".encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(identify(int(name)))
        return [proc for proc in found if proc is not None]

    for proc in marked():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(proc.pid, signal.SIGSTOP)  # so that none forks while others fall
    end_processes(marked(), term_timeout=0, rescan=marked)
