"""Where blocking code and coroutines meet: a bounded pool of daemon threads and one event loop.

Environments, tools and rewards may be written either way. :func:`run_blocking` runs a blocking
function without holding up the caller's event loop; :func:`run_coroutine` runs a coroutine for a
caller that has no loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from agentrl.errors import InfraError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_THREADS = 256
"""Blocking calls that run at once, per level of nesting; more of them wait."""


class DaemonPool:
    """A thread pool whose hung calls neither block the end of the process nor use up the pool.

    ``concurrent.futures`` joins its threads at exit, so one tool that never returns would keep the
    process alive. Here a call that was given up no longer counts, up to ``max_threads`` of them. Python
    cannot stop a thread, so each that hangs for good is lost; how many are is logged.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._given_up: set[Future[Any]] = set()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Runs ``call`` in a thread; the future carries its result or exception.

        Raises:
            InfraError: Every thread there may be is lost to a call that never returned.
        """
        future: Future[T] = Future()
        with self._changed:
            if len(self._given_up) >= 2 * self._max_threads:
                raise InfraError(
                    f"{len(self._given_up)} blocking calls of environments or tools never returned, and no thread is "
                    "left. Give what they wait for a timeout."
                )
            self._work.append((future, call))
            self._wake_a_thread()
        return future

    def give_up(self, future: Future[Any]) -> None:
        """Stops waiting for a call: not started, it never runs; running, its thread is replaced."""
        if future.cancel():
            return
        with self._changed:
            if not future.done():
                self._given_up.add(future)
                lost = len(self._given_up)
                if lost >= 16 and lost & (lost - 1) == 0:
                    logger.warning(
                        "%d blocking calls were given up and still run; what they wait for should have a timeout", lost
                    )
                if self._work:
                    self._wake_a_thread()

    def _wake_a_thread(self) -> None:
        if self._idle:
            self._idle -= 1  # claimed here, so that the next caller does not count on it too
            self._changed.notify()
        elif self._threads - min(len(self._given_up), self._max_threads) < self._max_threads:
            self._threads += 1
            threading.Thread(target=self._serve, name="agentrl-blocking", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._work:
                    self._idle += 1
                    self._changed.wait()
                future, call = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result, error = call(), None
            except BaseException as raised:
                result, error = None, ordinary(raised)
            with self._changed:
                self._given_up.discard(future)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, call, result, error  # an idle thread keeps nothing alive


def ordinary(error: BaseException) -> Exception:
    """The error as one that may cross into a coroutine: ``SystemExit`` would end the event loop,
    ``StopIteration`` would be lost in it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    replacement = RuntimeError(f"the called code raised {error!r}")
    replacement.__cause__ = error
    return replacement


# Blocking code may itself step an environment whose tools block. One pool a level keeps callers and
# the calls they wait for apart, so that a full pool cannot wait for itself.
_LEVEL: contextvars.ContextVar[int] = contextvars.ContextVar("agentrl_blocking_level", default=0)
_pools: dict[int, DaemonPool] = {}
_setup_lock = threading.Lock()


def _forget_threads() -> None:
    """After a fork: the child has none of the parent's threads."""
    global _setup_lock
    _pools.clear()
    _setup_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


class _Call:
    """A blocking call and the coroutines its thread waits for: giving it up ends them and frees the thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: set[Future[Any]] = set()
        self._given_up = False

    def awaits(self, future: Future[Any]) -> None:
        with self._lock:
            if not self._given_up:
                self._awaited.add(future)
                return
        future.cancel()

    def has(self, future: Future[Any]) -> None:
        with self._lock:
            self._awaited.discard(future)

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            awaited = list(self._awaited)
        for future in awaited:
            future.cancel()


_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("agentrl_blocking_call", default=None)


async def run_blocking(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs ``function(*args, **kwargs)`` in a thread and waits for it without blocking the loop.

    Context variables are copied into the thread. When the waiting task is cancelled, coroutines that the
    function waits for (:func:`run_coroutine`) are cancelled too; a thread that hangs elsewhere is
    left to finish on its own, since Python cannot stop it.
    """
    level = _LEVEL.get()
    with _setup_lock:
        if level not in _pools:
            _pools[level] = DaemonPool(MAX_THREADS)
        pool = _pools[level]
    context = contextvars.copy_context()
    context.run(_LEVEL.set, level + 1)
    call = _Call()
    context.run(_CALL.set, call)
    future = pool.submit(lambda: context.run(function, *args, **kwargs))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        pool.give_up(future)
        call.give_up()
        raise


class LoopThread:
    """An event loop in a daemon thread of its own, started when first used, and again after a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock, self._loop = threading.Lock(), None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(contained(coroutine), self._loop)

    def runs_here(self) -> bool:
        """Whether the caller is code on this loop, which must not wait for the loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False


_background = LoopThread("agentrl-loop")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on the process's background event loop and returns its result.

    Works with or without a running loop in the calling thread. One loop serves all callers, so that
    clients a coroutine keeps open between calls stay on the loop they were made on.

    Raises:
        RuntimeError: The caller is itself a coroutine on that loop and would wait for itself.
    """
    if _background.runs_here():
        name = coroutine.__qualname__
        coroutine.close()
        raise RuntimeError(
            f"async code called the blocking form of {name} and would wait for itself: await the async form."
        )
    future = _background.submit(coroutine)
    call = _CALL.get()
    if call is not None:
        call.awaits(future)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # KeyboardInterrupt in the caller must not leave the coroutine running
        raise
    finally:
        if call is not None:
            call.has(future)


async def contained(awaitable: Awaitable[T]) -> T:
    """Awaits code of others: where it ends the loop (``sys.exit()``) or cancels its own work, a ``RuntimeError``."""
    try:
        return await awaitable
    except SystemExit as error:
        raise ordinary(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the called code cancelled its own work") from None
