"""Completes what an author of an environment wrote: the other entry point, and a guard around both.

An author writes ``step`` or ``astep`` (``reset`` or ``areset``, ``close`` or ``aclose``). A class that
defines one of a pair gets the other made of it, bound to that class, so that ``super()`` works in
either style. Around both stands a guard: the outermost call of an environment's entry point runs
``_before_<name>`` and ``_after_<name>``; calls from inside it pass through.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

from agentrl.concurrency.event_loop import attend, ours
from agentrl.concurrency.threads import own_thread, run_blocking, run_coroutine

Function = Callable[..., Any]

PAIRS = (("reset", "areset"), ("step", "astep"), ("close", "aclose"))
"""Names of the blocking and the async entry points."""

SKIP = object()
"""What a ``_before_`` hook returns when the author's code is not to run."""

# Environments whose entry point is running in this context: an author's `super().step(...)` is part
# of the same turn. Context variables follow the call into threads and onto other loops.
_running: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("agentrl_running", default=())


def remade(factory: Function) -> Function:
    """What the factory makes of a function is made anew where it is unpickled (:mod:`agentrl.runs`)."""

    @functools.wraps(factory)
    def make(function: Function, *args: str) -> Function:
        made = factory(function, *args)
        if made is not function:
            made._agentrl_remade = (make, (function, *args))
        return made

    return make


def complete_pair(cls: type, blocking_name: str, async_name: str) -> None:
    """Makes both entry points of a pair run what the most derived class defines.
    Raises TypeError: the blocking one is a coroutine function, or the async one is not."""
    depth, blocking = _most_derived(cls, blocking_name)
    async_depth, asynchronous = _most_derived(cls, async_name)
    if depth == async_depth > 0:
        return  # both inherited from one class, where they were completed
    if inspect.iscoroutinefunction(blocking):
        raise TypeError(f"{cls.__name__}.{blocking_name} is a coroutine function: name it `{async_name}`.")
    if not inspect.iscoroutinefunction(asynchronous):
        raise TypeError(f"{cls.__name__}.{async_name} must be `async def`; blocking code goes in `{blocking_name}`.")
    if depth < async_depth:
        asynchronous = _async_from_blocking(blocking)
    elif async_depth < depth:
        blocking = _blocking_from_async(_attended(asynchronous))
    setattr(cls, blocking_name, _guard_blocking(blocking, blocking_name))
    setattr(cls, async_name, _guard_async(asynchronous, blocking_name))


def written(function: Function) -> Function:
    """The author's function behind its guard."""
    return getattr(function, "_agentrl_written", function)


@remade
def taking_settings(init: Function) -> Function:
    """A constructor that also takes the class's ``settings`` its signature does not name.

    They are no business of its ``**kwargs``, which may go to something that never heard of them.
    The outermost one of an object ends with ``_made``, when every attribute is set.
    """
    parameters = inspect.signature(init).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in self.settings if name in kwargs and name not in parameters}
        for name, value in given.items():
            setattr(self, name, value)
        init(self, *args, **kwargs)
        for name, value in given.items() if open_ended else ():
            setattr(self, name, value)  # a class it derives from may name it, and have set its default
        if type(self).__init__ is __init__:
            self._made()

    return __init__


def _most_derived(cls: type, name: str) -> tuple[int, Function]:
    for depth, owner in enumerate(cls.__mro__):
        if name in owner.__dict__:
            return depth, written(owner.__dict__[name])
    raise AttributeError(f"{cls.__name__} has no {name!r}")


@remade
def _async_from_blocking(function: Function) -> Function:
    @functools.wraps(function)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside = self.unwrapped
        # A wrapper waits for what is inside, which may need its thread for tools.
        asynchronous: Any = getattr(type(inside), f"a{function.__name__}", None)
        blocking = self is inside or hasattr(written(asynchronous), "_made_async")
        run = own_thread(inside).run if blocking else run_blocking
        return await run(function, self, *args, **kwargs)

    call._made_async = True  # type: ignore[attr-defined]
    return call


@remade
def _attended(function: Function) -> Function:
    """An author's coroutine function, which moves to a thread if it blocks; ours as they are."""
    if ours(function) or hasattr(function, "_made_async"):
        return function

    @functools.wraps(function)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        return await attend(
            f"{cls.__name__}.{function.__name__}",
            function,
            self,
            *args,
            owner=self.unwrapped,
            key=f"{cls.__module__}.{cls.__qualname__}",
            **kwargs,
        )

    return call


@remade
def _blocking_from_async(function: Function) -> Function:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_coroutine(function(self, *args, **kwargs))

    return call


@remade
def _guard_blocking(function: Function, name: str) -> Function:
    before, after = f"_before_{name}", f"_after_{name}"

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if id(self) in running:
            return function(self, *args, **kwargs)
        token = _running.set((*running, id(self)))
        try:
            if getattr(self, before)(*args, **kwargs) is SKIP:
                return None
            return getattr(self, after)(function(self, *args, **kwargs))
        finally:
            _running.reset(token)

    call._agentrl_written = function  # type: ignore[attr-defined]
    return call


@remade
def _guard_async(function: Function, name: str) -> Function:
    before, after = f"_before_{name}", f"_after_{name}"
    attended = _attended(function)

    @functools.wraps(function)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if id(self) in running:
            return await function(self, *args, **kwargs)
        token = _running.set((*running, id(self)))
        try:
            if getattr(self, before)(*args, **kwargs) is SKIP:
                return None
            return getattr(self, after)(await attended(self, *args, **kwargs))
        finally:
            _running.reset(token)

    call._agentrl_written = function  # type: ignore[attr-defined]
    return call
