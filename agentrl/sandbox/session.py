"""``Session``: one episode's interpreter, as the caller sees it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentrl.errors import ConfigError, InfraError
from agentrl.sandbox.holder import remove
from agentrl.sandbox.tiers import Sandbox, base_python, libraries

START_SECONDS = 30.0
GRACE_SECONDS = 30.0
"""Until a holder has ended everything."""
FENCE_SECONDS = 1.0
FLOOD_BYTES = 8 << 20
"""Output after which a call is ended instead of read on."""
_HOLDER = Path(__file__).with_name("holder.py")
_READ = 1 << 16
_HEADER = struct.Struct("!I")


@dataclass(frozen=True)
class Result:
    """What a piece of code gave.

    ``status`` is ``ok`` when the interpreter lives on, with ``value`` (the last expression's, as text) or ``error``
    (what was raised). Otherwise its state is lost: ``timeout``, ``output`` (too much of it), or ``exited``.
    """

    status: str
    output: str = ""
    cut: int = 0
    """Bytes of output that are not in ``output``."""
    value: str | None = None
    error: str | None = None
    detail: str = ""
    """How the interpreter ended, if it did: a signal or an exit status."""

    @property
    def lost(self) -> bool:
        """Whether variables and files are gone."""
        return self.status != "ok"


class Session:
    """An interpreter that keeps its state from call to call.

    It is started by the first call, and again after a call that ended it. It never outlives its caller, however that
    ends. One call runs at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._lock = threading.Lock()
        self._closed = False
        self._has_run = False
        self._interpreter: Interpreter | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the interpreter's holder, if it runs."""
        return self._interpreter.holder.pid if self._interpreter else None

    @property
    def mark(self) -> str | None:
        """Name of the interpreter, if it runs; see :data:`.tiers.MARK_ENV`."""
        return self._interpreter.mark if self._interpreter else None

    def run(self, code: str) -> Result:
        """Runs code and waits for its end.
        Raises InfraError: the session is closed; or no interpreter can be started, and none has run any code yet. After
        that, whatever fails is what the code left behind."""
        with self._lock:
            if self._interpreter is not None and self._interpreter.owner != os.getpid():
                self._drop()
            if self._interpreter is None:
                self._raise_if_closed()
                try:
                    self._interpreter = Interpreter(self.sandbox)
                    self._end_with_this = weakref.finalize(self, _end_later, self._interpreter)
                    self._end_with_this.atexit = False  # the holder sees for itself that its caller ends
                except (InfraError, ConfigError, OSError) as error:  # a full disk, say
                    if self._has_run:
                        return Result("exited", detail=f"a new one did not start: {error}"[:500])
                    raise InfraError(str(error)) from error
            self._raise_if_closed()  # while it started, or this call waited
            self._has_run = True
            result = self._interpreter.run(code)
            if result.lost:
                self._drop()
                self._raise_if_closed()
            return result

    def close(self) -> None:
        """Ends the interpreter and everything it started. May be called at any time, from any thread."""
        self._closed = True
        if (interpreter := self._interpreter) is not None:
            interpreter.hang_up()  # a call that runs ends by it
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drop(self) -> None:
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            self._end_with_this.detach()
            interpreter.end()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise InfraError("the Python session is closed.")


class Interpreter:
    """One interpreter, from its start to its end.
    Raises InfraError: it did not start; the text says what it said.
    Raises ConfigError: the machine lacks what the tier needs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.limits, self.owner, self.mark = sandbox.limits, os.getpid(), secrets.token_hex(8)
        self.output = Output(self.limits.max_output)
        plan = sandbox.plan(self.mark)
        self._folder = plan["folder"]
        self._group: int | None = None  # the interpreter's process, as the holder tells it
        self._control, theirs = socket.socketpair()
        plan |= {"caller": self.owner, "control": theirs.fileno()}
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        try:
            self.holder = subprocess.Popen(
                [base_python(), "-I", "-S", "-c", _HOLDER.read_text(encoding="utf-8"), json.dumps(plan)],
                stdin=requests,
                stdout=replies,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=libraries(),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self.forget()
            remove(self._folder)
            raise InfraError(f"the Python sandbox cannot be started: {error}") from error
        finally:
            theirs.close()
            for fd in (requests, replies, output):
                os.close(fd)
        for fd in (self._requests, self._replies, self._output):
            os.set_blocking(fd, False)
        status, _ = self._converse(b"", START_SECONDS)
        if status != "ok":
            self._read_output()
            said = self.output.text()[0].strip()
            self.end()
            raise InfraError(f"the Python sandbox ({sandbox.tier}) did not start ({status}): {said[-1000:]}")

    def run(self, code: str) -> Result:
        """Runs one piece of code."""
        self.output = Output(self.limits.max_output)
        fence = secrets.token_hex(16).encode()
        body = json.dumps({"code": code, "fence": fence.decode()}).encode("ascii")
        status, reply = self._converse(_HEADER.pack(len(body)) + body, self.limits.timeout)
        detail = ""
        if status == "ok":  # what was printed travels apart, up to the fence
            deadline = time.monotonic() + FENCE_SECONDS
            while not self.output.seen(fence) and self._output_comes(deadline - time.monotonic()):
                if self._read_output() > FLOOD_BYTES:
                    status = "output"
                    break
        else:
            self._read_output()
        if status == "exited":
            detail = self._how_it_ended()
        told = {key: reply[key] for key in ("value", "error") if isinstance(reply.get(key), str)}
        text, cut = self.output.text()
        return Result(status, text, cut, detail=detail, **told)

    def hang_up(self) -> None:
        """Has the holder end everything, without waiting for it."""
        if self.owner == os.getpid():  # else a forked copy: the session is its parent's
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Ends the interpreter with all it started, and waits until it is gone."""
        if self.owner != os.getpid():
            return self.forget()
        self.hang_up()
        try:
            ended = self.holder.wait(GRACE_SECONDS) >= 0
        except subprocess.TimeoutExpired:
            self.holder.kill()
            ended = self.holder.wait() >= 0
        if not ended and self._group is not None:  # the holder was killed: what it would have done, as far as it goes
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        remove(self._folder)  # if that is still there
        self.forget()

    def forget(self) -> None:
        """Closes this process's ends. In a forked copy that is all: the interpreter is the parent's."""
        self._control.close()
        for fd in (self._requests, self._replies, self._output):
            os.close(fd)
        if hasattr(self, "holder"):
            self.holder.returncode = self.holder.returncode or 0  # for `Popen`, which would report a running child

    def _converse(self, request: bytes, seconds: float) -> tuple[str, dict[str, Any]]:
        """Sends a request and waits for its reply; takes what is printed meanwhile. Gives ``ok`` and the reply; or
        ``timeout``, ``output``, ``exited``, and nothing."""
        deadline = time.monotonic() + seconds
        waiting, received = memoryview(request), bytearray()
        poller = select.poll()
        for fd in (self._control, self._replies, self._output):
            poller.register(fd, select.POLLIN)
        if request:
            poller.register(self._requests, select.POLLOUT)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(left * 1000 + 1))
            if self._output in ready:
                if self._read_output() > FLOOD_BYTES:
                    return "output", {}
                if self.output.closed:
                    poller.unregister(self._output)  # it would report its end for ever
            if self._requests in ready:
                try:
                    waiting = waiting[os.write(self._requests, waiting) :]
                except BrokenPipeError:
                    return "exited", {}
                if not waiting:
                    poller.unregister(self._requests)
            if self._replies in ready:
                data = os.read(self._replies, _READ)
                received += data
                reply = self._message(received) if data else {}
                if reply is not None:
                    return ("ok", reply) if reply else ("exited", {})
            if self._control.fileno() in ready:
                said = self._control.recv(64)
                if not said:
                    return "exited", {}
                self._group = int(said)
        return "timeout", {}

    def _message(self, received: bytearray) -> dict[str, Any] | None:
        """What was received: ``None`` while it is not complete, empty if it is no message. Never trusted."""
        if len(received) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(received)
        if size > 12 * self.limits.max_output + 65536:
            return {}
        if len(received) < _HEADER.size + size:
            return None
        try:
            message = json.loads(received[_HEADER.size : _HEADER.size + size])
        except (ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) else {}

    def _output_comes(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._output, select.POLLIN)
        return not self.output.closed and bool(poller.poll(max(seconds, 0) * 1000))

    def _read_output(self) -> int:
        """Takes what the pipe holds; how many bytes there were in all so far."""
        for _ in range(64):  # whoever writes faster than this is read again in the next round
            try:
                data = os.read(self._output, _READ)
            except BlockingIOError:
                break
            self.output.take(data)
            if not data:
                break
        return self.output.total

    def _how_it_ended(self) -> str:
        try:
            status = self.holder.wait(3.0)  # it is about to end by itself, unless the code closed what it should not
        except subprocess.TimeoutExpired:
            return "it answers no more"
        if status > 128:
            with contextlib.suppress(ValueError):
                return signal.Signals(status - 128).name
        return f"exit status {status}" if status >= 0 else "its holder was killed"


class Output:
    """What the code printed: the first part is kept, the rest is counted and dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept, self._last = bytearray(), b""
        self.total, self.closed = 0, False

    def take(self, data: bytes) -> None:
        """Takes what was read; nothing means that there will be no more."""
        self.closed = not data
        self.total += len(data)
        room = 4 * self._most + 64 - len(self._kept)  # a character has at most four bytes, and a fence its own
        self._kept += data[: max(room, 0)]
        self._last = (self._last + data)[-_READ:]

    def seen(self, fence: bytes) -> bool:
        """Whether the mark at the end of a call's output is there, which it takes away."""
        if fence not in self._last:
            return False
        self.total -= len(fence)
        if (at := self._kept.find(fence)) >= 0:
            del self._kept[at : at + len(fence)]
        return True

    def text(self) -> tuple[str, int]:
        """The kept part, at most ``most`` characters, and how many bytes are missing."""
        text = self._kept.decode("utf-8", "replace")[: self._most]
        return text, max(self.total - len(text.encode("utf-8", "replace")), 0)


def _end_later(interpreter: Interpreter) -> None:
    """For the garbage collector, which must not wait."""
    interpreter.hang_up()
    threading.Thread(target=interpreter.end, daemon=True).start()
