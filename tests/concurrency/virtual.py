"""An event loop whose clock jumps to the next timer: minutes pass at once, and a wait without an end is found."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """For coroutines that neither read from sockets nor use threads."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("nothing will ever happen any more: a wait without an end")
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end, on the virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
