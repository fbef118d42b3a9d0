"""Coroutines of authors on the event loop that serves all episodes and talks to engines.

A coroutine that blocks (``requests.get`` or ``time.sleep`` in an ``async def``) holds up everything else on the loop,
and no timeout can end it. :func:`attend` measures how long each coroutine keeps the loop between one ``await`` and the
next. One that blocks twice in a short while is from then on run in a thread, on a loop of that thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.concurrency.threads import own_thread, run_blocking, run_in_this_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

HELD_SECONDS = 0.25
"""Time without an ``await`` from which on a coroutine is said to block."""
NEAR_CALLS = 100
"""So many calls of a coroutine function may lie between two that block, for it to be moved to a thread. A first call
that imports a library, or a pause of the whole machine, moves nothing."""


class HeldTooLong(Exception):
    """A coroutine kept the loop for longer than it may take at all."""


@dataclass
class Holder:
    """What is known of a coroutine function: how often it was called, how often it blocked, at most for how long."""

    what: str = ""
    where: str = ""
    calls: int = 0
    held: int = 0
    seconds: float = 0.0
    in_thread: bool = False
    _last: int | None = None

    def note(self, what: str, function: Any, seconds: float, movable: bool) -> None:
        """``function``, ``what`` to a person, blocked for so long."""
        near = self._last is not None and self.calls - self._last < NEAR_CALLS
        if seconds > self.seconds:
            self.what, self.where, self.seconds = what, _place(function), seconds
        self.held, self._last = self.held + 1, self.calls
        if self.held == 1:
            logger.warning("%s", self.sentence())
        if near and movable and not self.in_thread:
            self.in_thread = True
            logger.info("%s blocked again: its calls run in threads from here on", self.what)

    def sentence(self) -> str:
        """What it did and what to do about it."""
        return (
            f"{self.what} ({self.where}) is `async` and blocked for {self.seconds:.1f} s without an `await`: meanwhile "
            "no other episode goes on and no timeout works. Write blocking code as a plain `def`, which is run in a "
            "thread, or await asyncio.to_thread(...)."
        )


holders: dict[Hashable, Holder] = {}
"""By the code of a coroutine function, or the name of an environment's class: all that were attended."""


async def attend(
    what: str,
    function: Callable[..., Coroutine[Any, Any, T]],
    *args: Any,
    owner: object | None = None,
    key: Any = None,
    limit: float = float("inf"),
    movable: bool = True,
    **kwargs: Any,
) -> T:
    """Awaits ``function(*args, **kwargs)``, here or, where it is known to block, in a thread.

    Args:
        what: Names it to a person.
        function: An author's coroutine function.
        owner: In whose own thread it runs, if it must; None: any.
        key: What is counted and moved together: a function, such as the one behind ``function``, or a name. What a
            ``reset`` opened on one loop cannot be used by a ``step`` on another.
        limit: Seconds that it may take at all.
        movable: Whether it may run in a thread. One that talks to engines may not.

    Raises:
        HeldTooLong: It blocked for longer than ``limit``, when no timeout could end it.
    """
    written = key if callable(key) else function
    if key is None or callable(key):
        key = _code(written)
    holder = holders.get(key)
    if holder is None:
        holder = holders.setdefault(key, Holder())
    holder.calls += 1
    if holder.in_thread:
        run = run_blocking if owner is None else own_thread(owner).run
        return await run(run_in_this_thread, function, *args, **kwargs)

    def note(seconds: float) -> None:
        holder.note(what, written, seconds, movable)

    return await _watched(function(*args, **kwargs), note, limit)


@types.coroutine
def _watched(coroutine: Coroutine[Any, Any, T], note: Callable[[float], None], limit: float) -> Generator[Any, Any, T]:
    """Awaits a coroutine and calls ``note`` when it blocks; what it awaits and is watched itself is not counted."""
    raised: BaseException | None = None
    total = 0.0
    while True:
        others, began = _noted.seconds, time.perf_counter()
        try:
            awaited = coroutine.send(None) if raised is None else coroutine.throw(raised)
        except StopIteration as end:
            if total + time.perf_counter() - began - (_noted.seconds - others) > limit:
                raise HeldTooLong from None
            return end.value
        finally:
            held = time.perf_counter() - began - (_noted.seconds - others)
            if held > HELD_SECONDS:
                _noted.seconds += held
                total += held
                note(held)
        raised = None
        try:
            yield awaited
        except BaseException as error:  # cancellation: the coroutine's business
            raised = error


class _Noted(threading.local):
    """Seconds for which coroutines that blocked in this thread are blamed already."""

    seconds = 0.0


_noted = _Noted()


def ours(function: Any) -> bool:
    """Whether a function is of this package, and so needs no attention."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "agentrl"


def _code(function: Any) -> Any:
    """The code of a function, method, partial or callable object: the same for each closure made of it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", function)


def _place(function: Any) -> str:
    code = _code(function)
    if not isinstance(code, types.CodeType):
        return "no source"
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
