"""Runs a command as a child, and starts it again when it ends by a fault that another start may cure.

Three things of the kernel's make it sound. The child is in a process group of its own, so that a signal reaches it
once, from here. It gets SIGTERM when this process ends, however that comes about. What it orphans becomes ours (a
subreaper's), so that nothing of one attempt lives on into the next.

The child tells through a pipe what the next start needs to know (:class:`Attempt`). It imports as little as it can: for
as long as the run goes on, this process is there beside it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Self

from agentrl.errors import LostError
from agentrl.processes.signals import ENDING
from agentrl.processes.tree import Process, adopt_orphans, descendants, die_with_parent, end_tree, reap

ATTEMPT_ENV = "AGENTRL_ATTEMPT"
CRASHES = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals by which a process ends through no wish of a person: the OOM killer's, and those of crashes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
ENDING_S = 1500.0
"""How long the child may take to end after a signal: one that saves gives up twice, after 600 s each."""
LEAVING_S = 20.0
"""How long what a dead attempt left behind may take to end by itself: its warden needs up to 15 s."""


class Attempt:
    """The child's end: which attempt this is, and what it tells.

    Attributes:
        number: 1 for the first.
        began: ``time.monotonic()`` of the first attempt's start.
    """

    def __init__(self, number: int, began: float, pipe: int):
        self.number, self.began, self._pipe = number, began, pipe
        os.set_inheritable(pipe, False)

    @classmethod
    def of_environment(cls) -> Self | None:
        """This process's, if it is supervised. Asked once: children of this process are not."""
        described = os.environ.pop(ATTEMPT_ENV, None)
        return cls(**json.loads(described)) if described else None

    def tell(self, **facts: Any) -> None:
        """Keys as of :func:`supervise`; the last value counts."""
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone: SIGTERM is on its way
            os.write(self._pipe, f"{json.dumps(facts)}\n".encode())


def pause_before(restart: int) -> float:
    """Seconds to wait before the n-th restart in a row that follows no progress: 1, 5, 10, 20, ... at most 300."""
    return FIRST_PAUSE_S if restart <= 1 else min(5.0 * 2.0 ** (restart - 2), LONGEST_PAUSE_S)


def supervise(
    command: Sequence[str],
    again: Callable[[str], Sequence[str]],
    *,
    progress: Callable[[str], int],
    limit: int,
    say: Callable[[str], None],
    pause: Callable[[int], float] = pause_before,
) -> int:
    """Run ``command`` to its end, through faults; returns its exit code.

    The child may tell: ``run``, what ``progress`` is asked of; ``load``, with which it is started again (before it
    tells one, ``command`` is); ``start``, how far the run was when it began; ``open``, true from when it works until it
    ends in order; ``error``, the fault it ends by; ``done``, that nothing is left to do.

    Args:
        command: words of the command.
        again: from ``load`` to the words of the command that goes on.
        progress: how far the run has come, of what is kept. More than at the last restart means progress.
        limit: restarts in a row without progress. Then the fault stands.
        say: where a line for a person goes.
        pause: seconds before the n-th restart in a row without progress.
    """
    adopt_orphans()
    began, number, far, restarts = time.monotonic(), 1, 0, 0
    told: dict[str, Any] = {}
    with _Signals() as signals:
        while True:
            told |= {"error": None, "open": False}
            code = _attempt(command, number, began, told, signals)
            end_leftovers(LEAVING_S)
            if told.get("done"):
                return 0
            if signals.asked or not is_curable(code, told["open"]):
                return code if code >= 0 else 128 - code
            fault = told["error"] or f"the driver ended without a word ({ending(code)}): killed, or ended by a library"
            now = progress(told["run"]) if "run" in told else 0
            if now > max(far, told.get("start", 0)):
                restarts = 0
            far = max(now, far)
            if restarts >= limit:
                say(f"given up after {restarts} restarts in a row without a new checkpoint")
                print(f"error: {fault}", file=sys.stderr)
                return LostError.exit_code
            restarts += 1
            number += 1
            seconds = pause(restarts)
            without = f", restart {restarts} of {limit} without a new checkpoint" if restarts > 1 else ""
            where = f"going on from step {now}" if now else "beginning again"
            say(f"attempt {number}{without}, {where} in {seconds:.0f} s: {fault}")
            if signals.wait(seconds):
                return 128 + signals.asked[0]
            if "load" in told:
                command = again(told["load"])


def is_curable(code: int, is_open: bool) -> bool:
    """Whether another start may cure what ended a process with that return code, as of :mod:`subprocess`. ``is_open``:
    it worked, and did not end in order; Ray ends a driver that lost it from C++, with code 1."""
    return code == LostError.exit_code or -code in CRASHES or (code > 0 and is_open)


def ending(code: int) -> str:
    """A return code, in words."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _attempt(command: Sequence[str], number: int, began: float, told: dict[str, Any], signals: _Signals) -> int:
    reading, writing = os.pipe()
    described = json.dumps({"number": number, "began": began, "pipe": writing})
    hearing = threading.Thread(target=_hear, args=(reading, told), daemon=True)
    hearing.start()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, ATTEMPT_ENV: described},
            pass_fds=[writing],
            process_group=0,
            preexec_fn=functools.partial(die_with_parent, signum=signal.SIGTERM),
        )
    finally:
        os.close(writing)
    with signals.passed_to(child):
        code = child.wait()
    hearing.join(LEAVING_S)
    return code


def _hear(reading: int, told: dict[str, Any]) -> None:
    with open(reading, "rb") as pipe:
        for line in pipe:
            with contextlib.suppress(ValueError):  # torn: the child died while it wrote
                told.update(json.loads(line))


def end_leftovers(seconds: float) -> list[Process]:
    """Wait for all that descends from this process, then end what is left; returns what had to be ended."""
    deadline = time.monotonic() + seconds
    while (left := reap(descendants(os.getpid(), include_root=False))) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        end_tree(left, grace=2.0)
        reap(left)
    return left


class _Signals:
    """Ctrl-C, SIGTERM and SIGHUP: passed on to the child, which then has :data:`ENDING_S`, and the end of waiting.
    Ctrl-Z stops and goes on with it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, *ENDING):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def passed_to(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Within, signals go to ``child``; also one that came just before."""
        self._child = child
        for number in self.asked:
            self._send(number)
        try:
            yield
        finally:
            self._child = None

    def wait(self, seconds: float) -> bool:
        """Whether a signal asked to end within so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return bool(self.asked)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)
        if self._child is not None:
            self._send(number)

    def _send(self, number: int) -> None:
        assert self._child is not None
        self._child.send_signal(number)
        limit = threading.Timer(ENDING_S, self._child.kill)
        limit.daemon = True
        limit.start()

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)
