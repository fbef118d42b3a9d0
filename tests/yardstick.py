"""What a call costs, told without a clock: a slow or busy machine comes to the same verdict as a quick one."""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(megaturns: float, call: Callable[[], T], what: object = "", *, tries: int = 3) -> T:
    """The result of `call`, whose CPU time on this thread is at most that of so many million turns of an empty loop.

    The loop runs beside it (a million turns: about 0.03 s of a laptop's core). No garbage is collected meanwhile: what
    that costs depends on the tests before. AssertionError where none of `tries` is that cheap; it names `what`.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        costs = []
        for _ in range(tries):
            seconds, result = _timed(call)
            costs.append(seconds / _timed(_turns)[0] / 10)
            if costs[-1] <= megaturns:
                return result
        raise AssertionError(f"{what}: {min(costs):.1f} million turns, at most {megaturns} expected")
    finally:
        if collecting:
            gc.enable()


def _turns() -> None:
    for _ in range(100_000):
        pass


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    started = time.thread_time()
    result = call()
    return time.thread_time() - started, result
