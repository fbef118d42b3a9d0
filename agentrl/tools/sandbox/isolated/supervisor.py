"""The process between the caller and the interpreter: starts it, watches it, ends it.

One supervisor serves one session. It runs none of the model's code, so it can be trusted with what the interpreter
cannot: the deadline, the account of processes, memory and files, and the end of the whole tree. It ends when its
caller does, also by ``kill -9``: it watches the caller through a descriptor of the process, not through a signal
that would already come when the thread that started it ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Any

from . import confine, tree
from .wire import Reader, WireError, encode
from .worker import FLOOD_BYTES, Worker, remove_folder

WATCH_SECONDS = 0.05
DISK_EVERY = 5  # looks at the files once in so many looks at the processes
REQUEST_BYTES = 64 << 20


class CallerGone(Exception):
    """Nobody waits for an answer any more."""


def main() -> None:
    """``python -c "..." CALLER``: standard input is the caller's socket, the argument its process id."""
    control, caller = 0, int(sys.argv[1])
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, _leave)
    watched = os.pidfd_open(caller)
    if os.getppid() != caller:
        return  # it went before it could be watched
    supervisor = Supervisor(control, watched)
    try:
        supervisor.serve()
    except CallerGone:
        return
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        supervisor.end()


def _leave(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


class Supervisor:
    """Answers the caller's requests, each with the result of one piece of code."""

    def __init__(self, control: int, caller: int) -> None:
        self.control, self.caller = control, caller
        self.reader = Reader(REQUEST_BYTES)
        self.poller = select.poll()
        self.poller.register(control, select.POLLIN)
        self.poller.register(caller, select.POLLIN)
        self.settings: dict[str, Any] = {}
        self.worker: Worker | None = None

    def serve(self) -> None:
        """Until the caller is gone. The first message holds the settings, all others hold code."""
        confine.become_subreaper()
        self.settings = self.receive()
        self.send({"ready": True})
        while True:
            code = self.receive()["code"]
            try:
                answer = self.run(code)
            except OSError as error:
                answer = {"status": "unavailable", "detail": f"{type(error).__name__}: {error}"}
            if answer["status"] != "ok":
                self.discard()
            self.send(answer)

    def receive(self) -> dict[str, Any]:
        """The caller's next message; waits without using the CPU.

        Raises:
            CallerGone: there will be none.
        """
        while True:
            ready = dict(self.poller.poll())
            if self.control not in ready:
                raise CallerGone
            data = os.read(self.control, 1 << 16)
            if not data:
                raise CallerGone
            message = self.reader.feed(data)
            if message is not None:
                return message

    def send(self, message: dict[str, Any]) -> None:
        data = memoryview(encode(message))
        try:
            while data:
                data = data[os.write(self.control, data) :]
        except OSError as error:
            raise CallerGone from error

    def run(self, code: str) -> dict[str, Any]:
        """Runs one piece of code, in a new interpreter if there is none."""
        if self.worker is None:
            self.worker = Worker(self.settings)
            status, ready = self.converse(b"", self.settings["start_timeout"], watch=False)
            if status != "ok":
                self.worker.read_output()
                said = self.worker.output.text()[0].strip()
                return {"status": "unavailable", "detail": f"the interpreter did not start ({status}): {said[-1000:]}"}
            self.worker.ready(ready.get("guards"))
        worker = self.worker
        fence = os.urandom(16).hex()
        worker.begin()
        status, reply = self.converse(encode({"code": code, "fence": fence}), self.settings["timeout"], watch=True)
        answer: dict[str, Any] = {"status": status, "guards": worker.guards}
        if status == "ok":
            settled = worker.settle(fence, _readable)
            answer["status"] = (worker.limit_passed(files=True) or "ok") if settled else "processes"
            answer.update({key: reply[key] for key in ("value", "error") if isinstance(reply.get(key), str)})
        else:
            worker.read_output()
            if status == "exited":
                answer["detail"] = worker.exit_reason()
        answer["output"], answer["cut"] = worker.output.text()
        return answer

    def converse(self, request: bytes, seconds: float, *, watch: bool) -> tuple[str, dict[str, Any]]:
        """Sends a request and waits for its reply.

        Args:
            request: what to send; may be longer than a pipe holds.
            seconds: until the reply must be here.
            watch: whether the limits of a call are looked after.

        Returns:
            ``ok`` and the reply; or the limit that was passed (``timeout``, ``cpu``, ``memory``, ``processes``,
            ``disk``, ``output``), ``exited`` or ``broken``, and nothing.

        Raises:
            CallerGone: the caller ended or closed the session.
        """
        worker = self.worker
        assert worker is not None
        deadline = time.monotonic() + seconds
        looks, next_look = 0, time.monotonic() + WATCH_SECONDS
        waiting = memoryview(request)
        poller = self._poller_for(worker, writing=bool(request))
        while (now := time.monotonic()) < deadline:
            if watch and now >= next_look:
                looks, next_look = looks + 1, now + WATCH_SECONDS
                passed = worker.limit_passed(files=looks % DISK_EVERY == 0)
                if passed:
                    return passed, {}
            until = min(deadline, next_look) if watch else deadline
            ready = dict(poller.poll(max(until - now, 0) * 1000 + 1))
            if self.control in ready or self.caller in ready:
                raise CallerGone
            if worker.output_fd in ready and worker.read_output() > FLOOD_BYTES:
                return "output", {}
            if worker.output_closed and worker.output_fd in ready:
                poller.unregister(worker.output_fd)  # it would report its end for ever
            if worker.request_fd in ready:
                try:
                    waiting = waiting[os.write(worker.request_fd, waiting) :]
                except BrokenPipeError:
                    return _ended(worker), {}
                if not waiting:
                    poller.unregister(worker.request_fd)
            if worker.reply_fd in ready:
                try:
                    reply = worker.read_reply()
                except WireError:
                    return "broken", {}
                if reply is not None:
                    return "ok", reply
                if worker.reply_closed:
                    return _ended(worker), {}
            elif worker.pidfd in ready:
                return "exited", {}
        return "timeout", {}

    def _poller_for(self, worker: Worker, *, writing: bool) -> select.poll:
        poller = select.poll()
        for fd in (self.control, self.caller, worker.reply_fd, worker.pidfd):
            poller.register(fd, select.POLLIN)
        if not worker.output_closed:
            poller.register(worker.output_fd, select.POLLIN)
        if writing:
            poller.register(worker.request_fd, select.POLLOUT)
        return poller

    def discard(self) -> None:
        """Ends the interpreter and all it started, and removes its folder."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.end()
        remove_folder(self.settings.get("folder"))

    def end(self) -> None:
        """Leaves nothing behind: no process, no folder."""
        self.discard()
        tree.end()


def _ended(worker: Worker) -> str:
    """A pipe closed: the interpreter ended, or its code closed what it should not have."""
    return "exited" if _readable(worker.pidfd, 0.5) else "broken"


def _readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])
