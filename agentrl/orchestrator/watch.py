"""Watches what a run cannot replace: the trainer's ranks, the rollout manager, Ray itself. Engines and rollout workers
are replaced by the pools they are in.

A Ray actor is asked for a pulse, which it gives from a thread of its own (concurrency group :data:`PULSE`): a process
that ended is noticed at once, for a question is always open, and one that stands still (stopped, swapped out, stuck in
a call that holds Python's lock) is told from one that works. The pulse also says for how long the work at hand has come
no further (:mod:`agentrl.processes.pulse`): that tells a collective that never ends from a long step.

Ray's own processes on this machine are watched by the kernel, and looked at now and then: one may have been stopped.
Left to itself, Ray goes on for a minute without its head and then ends the driver from C++.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import psutil

from agentrl.errors import AgentRLError, ConfigError, LostError
from agentrl.processes.pulse import Pulse
from agentrl.processes.tree import identify

log = logging.getLogger(__name__)

PULSE = "pulse"
"""Ray's concurrency group of pulses; see :func:`with_pulse`."""
WEIGHTS = "weights"
"""That in which rank 0 sends weights: one thread sends, another can end that."""
SAVES = "saves"
"""That in which ranks write checkpoints beside what they train."""
PULSE_S = 5.0
FIRST_PULSE_S = 900.0
"""Longest wait for an actor's process to be there."""
GRACE_S = 2.0
"""How long a failure waits for word of a process that died: the others fail because of it, often sooner."""


class ProcessLostError(LostError):
    """A process that a run cannot do without died or stands still. The text names the first of them."""


def with_pulse(actor: type, **threads: int) -> Any:
    """The class, which has a method ``pulse(seconds, stall) -> Pulse`` that answers after so many seconds, as a Ray
    actor with a thread for it, and more concurrency groups with so many ``threads``."""
    import ray

    return ray.remote(concurrency_groups={PULSE: 1, **threads})(actor)  # type: ignore[call-overload]  # not in Ray's types


async def until_lost(
    name: str, handle: Any, log_file: os.PathLike[str] | str, patience: float, *, stall: float = math.inf
) -> str | None:
    """Ask an actor made :func:`with_pulse` for its pulse until there is none; what became of it.

    None: it could not be made; the call that waits for it says why.

    Args:
        patience: seconds for which it may stand still.
        stall: seconds for which its work may come no further.
    """
    from ray.exceptions import ActorUnavailableError, RayError

    who, waits = name, FIRST_PULSE_S
    while True:
        asked = time.monotonic()
        try:
            async with asyncio.timeout(waits):
                pulse = await _pulse(handle, ActorUnavailableError, stall)
        except TimeoutError:
            if time.monotonic() - asked > waits + PULSE_S:
                continue  # this process stood still itself (Ctrl-Z, a suspended machine): the answer may be here by now
            return f"{who} gave no sign of life for {waits:.0f} s: it hangs or was stopped"
        except RayError as error:
            log.error("%s: %s", name, error)
            if getattr(error, "actor_init_failed", False):
                return None
            return f"{who} died: killed, perhaps for lack of memory, or crashed; see {log_file}"
        who, waits = f"{name} (process {pulse.pid})", PULSE_S + patience
        if pulse.stalled > stall:
            return (
                f"{who} came no further with {pulse.at} for {pulse.stalled:.0f} s (--train-stall-timeout {stall:g}): "
                f"it hangs, or waits for one that does; its stack is in {log_file}"
            )


async def _pulse(handle: Any, unavailable: type[Exception], stall: float) -> Pulse:
    while True:
        try:
            return Pulse(*await handle.pulse.options(concurrency_group=PULSE).remote(PULSE_S, stall))
        except unavailable:  # a connection broke; whether the process did, the next answer tells
            await asyncio.sleep(0.5)


class Watch:
    """Around the coroutine of a run: cancels it when a watched process is lost, and raises what was lost first.

    Also an error of the run itself gives way to the loss that caused it.

    Args:
        patience: seconds for which a process may stand still.
        stall: seconds for which its work may come no further.
    """

    def __init__(self, patience: float, *, stall: float = math.inf):
        self._patience, self._stall = patience, stall
        self._tasks: list[asyncio.Task[None]] = []
        self._fds: list[int] = []
        self._lost = asyncio.Event()
        self._error: ProcessLostError | None = None
        self._cancelled = False

    async def __aenter__(self) -> Self:
        self._body = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._body = None  # from here on nothing is cancelled
        try:
            if isinstance(error, AgentRLError) and not isinstance(error, ConfigError) and self._tasks:
                async with asyncio.timeout(GRACE_S):
                    await self._lost.wait()
        except TimeoutError:
            pass
        finally:
            self._stop()
        if self._error is None or isinstance(error, KeyboardInterrupt):
            return
        if self._cancelled and (task := asyncio.current_task()) and task.uncancel():
            return  # Ctrl-C at the same time
        raise self._error from error

    @property
    def has_lost(self) -> bool:
        """Whether a watched process is lost."""
        return self._error is not None

    def actor(self, name: str, handle: Any, log_file: os.PathLike[str] | str) -> None:
        """Watch a Ray actor made :func:`with_pulse`."""
        self._tasks.append(asyncio.create_task(self._ask(name, handle, log_file)))

    def processes(self, pids: Mapping[str, int]) -> None:
        """Watch processes of this machine, by name: for their end, and for being stopped."""
        for name, pid in pids.items():
            try:
                watched = os.pidfd_open(pid)
            except ProcessLookupError:
                self._report(f"{name} (process {pid}) ended")
                continue
            self._fds.append(watched)
            asyncio.get_running_loop().add_reader(
                watched, self._report, f"{name} (process {pid}) ended: killed, perhaps for lack of memory, or crashed"
            )
            self._tasks.append(asyncio.create_task(self._look(f"{name} (process {pid})", pid)))

    async def _look(self, who: str, pid: int) -> None:
        since = None
        while process := identify(pid):
            try:
                stopped = process.status() == psutil.STATUS_STOPPED
            except psutil.NoSuchProcess:
                return
            since = (since or time.monotonic()) if stopped else None
            if since and time.monotonic() - since >= self._patience:
                return self._report(f"{who} has been stopped for {self._patience:.0f} s")
            await asyncio.sleep(PULSE_S)

    async def _ask(self, name: str, handle: Any, log_file: os.PathLike[str] | str) -> None:
        lost = await until_lost(name, handle, log_file, self._patience, stall=self._stall)
        if lost is not None:
            self._report(lost)

    def _report(self, what: str) -> None:
        if self._error is not None:
            return
        self._error = ProcessLostError(what)
        self._lost.set()
        if self._body is not None:
            self._cancelled = True
            self._body.cancel()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for fd in self._fds:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
