"""Several coroutines at a time: none outlives an error of another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order. An error of one cancels the others, and is raised when they have ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in running]
