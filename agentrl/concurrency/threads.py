"""Where blocking code and coroutines meet: a bounded pool of daemon threads, threads that belong to one object, and
one event loop.

Environments, tools and rewards may be written either way. :func:`run_blocking` runs a blocking
function without holding up the caller's event loop; :func:`own_thread` does it in the same thread each time;
:func:`run_coroutine` runs a coroutine for a caller that has no loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from agentrl.errors import InfraError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_THREADS = 256
"""Blocking calls that run at once, per level of nesting; more of them wait."""

MAX_OWN_THREADS = 1024
"""Threads that belong to one object each; an object beyond them shares the pool."""


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
        Raises InfraError: every thread there may be is lost to a call that never returned."""
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
            _run(future, call, functools.partial(self._ended, future))
            del future, call  # an idle thread keeps nothing alive

    def _ended(self, future: Future[Any]) -> None:
        with self._changed:
            self._given_up.discard(future)


def _run(future: Future[Any], call: Callable[[], Any], ended: Callable[[], None]) -> None:
    """One call in a thread; ``ended`` comes before anybody hears of the result."""
    if not future.set_running_or_notify_cancel():
        ended()
        return
    try:
        result, error = call(), None
    except BaseException as raised:
        result, error = None, as_exception(raised)
    ended()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def as_exception(error: BaseException) -> Exception:
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
    _own.clear()
    _Worker.alive, _Worker._counting = 0, threading.Lock()
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
    return await _in_thread(pool, function, args, kwargs)


async def _in_thread(threads: DaemonPool | _Worker, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    context = contextvars.copy_context()
    context.run(_LEVEL.set, _LEVEL.get() + 1)
    call = _Call()
    context.run(_CALL.set, call)
    future = threads.submit(lambda: context.run(function, *args, **kwargs))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        threads.give_up(future)
        call.give_up()
        raise


class _Worker:
    """The thread of one object."""

    alive = 0
    _counting = threading.Lock()

    @classmethod
    def start(cls) -> _Worker | None:
        """A new one; None when there are :data:`MAX_OWN_THREADS`."""
        with cls._counting:
            if cls.alive >= MAX_OWN_THREADS:
                return None
            cls.alive += 1
        worker = cls()
        threading.Thread(target=worker._serve, name="agentrl-own", daemon=True).start()
        return worker

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.busy = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def give_up(self, future: Future[Any]) -> None:
        """Not started, it never runs; running, the thread stays busy until it returns."""
        future.cancel()

    def release(self) -> None:
        """The object is done with the thread. May be called by the garbage collector, so it takes no lock."""
        self._calls.put(None)

    def _serve(self) -> None:
        _kept_loop.kept = True
        while (item := self._calls.get()) is not None:
            _run(*item, self._is_free)
            del item  # a waiting thread keeps nothing alive
        _kept_loop.close()
        with _Worker._counting:
            _Worker.alive -= 1

    def _is_free(self) -> None:
        self.busy = False


class OwnThread:
    """One thread for the blocking calls of one object: what is bound to a thread (``sqlite3``) lives from call to call.

    A call while another one runs, side by side or after one that hangs, goes to the pool of all.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs ``function(*args, **kwargs)`` as :func:`run_blocking` does."""
        with self._lock:
            if self._worker is None:
                self._worker = _Worker.start()
            worker = self._worker
            if worker is None or worker.busy:
                worker = None
            else:
                worker.busy = True
        if worker is None:
            return await run_blocking(function, *args, **kwargs)
        return await _in_thread(worker, function, args, kwargs)

    def release(self) -> None:
        """Lets the thread end, once it is done."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.release()

    __del__ = release


_own: dict[int, OwnThread] = {}  # by id, since what they belong to need not be hashable


def own_thread(owner: object) -> OwnThread:
    """The thread of ``owner``. It has one until :func:`release_thread`, or until it is no more."""
    thread = _own.get(id(owner))
    return thread if thread is not None else belongs_to(owner, OwnThread())


def belongs_to(owner: object, thread: OwnThread) -> OwnThread:
    """Makes ``thread`` that of ``owner``, if it has none yet."""
    with _setup_lock:
        known = _own.setdefault(id(owner), thread)
    if known is thread:
        weakref.finalize(owner, _forget_owner, id(owner)).atexit = False
    return known


def has_thread(owner: object) -> bool:
    """Whether ``owner`` has a thread."""
    return id(owner) in _own


def release_thread(owner: object) -> None:
    """Lets the thread of ``owner`` end, if it has one."""
    thread = _own.get(id(owner))
    if thread is not None:
        thread.release()


def _forget_owner(number: int) -> None:
    thread = _own.pop(number, None)
    if thread is not None:
        thread.release()


class _KeptLoop(threading.local):
    """The event loop of a thread, for coroutines that are run in it. It stays as long as the thread has one owner."""

    kept = False
    runner: asyncio.Runner | None = None

    def close(self) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()


_kept_loop = _KeptLoop()


def run_in_this_thread(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
    """Runs a coroutine function to its end on a loop of the calling thread, for :func:`run_blocking` or an own thread.

    When that call is given up, the coroutine is cancelled.
    """
    call = _CALL.get()

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        ending: Future[None] = Future()  # cancelled by whoever gives up the call
        ending.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(task.cancel))
        if call is not None:
            call.awaits(ending)
        try:
            return await await_user_code(function(*args, **kwargs))
        finally:
            if call is not None:
                call.has(ending)

    if not _kept_loop.kept:
        with asyncio.Runner() as runner:
            return runner.run(cancellable(), context=contextvars.copy_context())
    if _kept_loop.runner is None:
        _kept_loop.runner = asyncio.Runner()
    return _kept_loop.runner.run(cancellable(), context=contextvars.copy_context())


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
        return asyncio.run_coroutine_threadsafe(await_user_code(coroutine), self._loop)

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

    Raises RuntimeError: the caller is itself a coroutine on that loop and would wait for itself."""
    if _background.runs_here():
        name = getattr(coroutine, "__qualname__", "a coroutine")
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


async def await_user_code(awaitable: Awaitable[T]) -> T:
    """Awaits code of others: where it ends the loop (``sys.exit()``) or cancels its own work, a ``RuntimeError``."""
    try:
        return await awaitable
    except SystemExit as error:
        raise as_exception(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the called code cancelled its own work") from None
