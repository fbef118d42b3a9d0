"""What a transport is to the sync: it brings a published version into paused engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.engines.control import Call, EngineControl
from agentrl.engines.pool import SyncReport
from agentrl.errors import EngineError
from agentrl.weights.snapshot import Snapshot


@dataclass(frozen=True)
class Deadlines:
    """Seconds each state may take, for one engine."""

    pause: float = 60.0
    connect: float = 30.0
    bucket: float = 120.0
    disk: float = 600.0
    resume: float = 20.0
    verify: float = 120.0


@dataclass
class SyncRun:
    """The state of one sync. What is asked of an engine first is ``opening``, what is asked last ``closing``."""

    snapshot: Snapshot
    active: list[EngineControl]
    deadlines: Deadlines
    opening: tuple[Call, ...]
    closing: tuple[Call, ...]
    flush: bool
    """Whether the update itself drops the prefix cache."""
    report: SyncReport
    touched: list[EngineControl] = field(default_factory=list)
    """Engines that may be paused, with part of the new weights."""
    running: set[EngineControl] = field(default_factory=set)
    """Those that were continued."""
    failed: dict[EngineControl, str] = field(default_factory=dict)
    settled: set[EngineControl] = field(default_factory=set)  # failed, retired and resumed
    finished: bool = False  # came to its end, with or without failed engines

    def fail(self, engine: EngineControl, reason: object) -> None:
        """This engine must be replaced. The first reason stays."""
        if engine in self.active:
            self.active.remove(engine)
        self.failed.setdefault(engine, str(reason))

    async def each(self, call: Callable[[EngineControl], Awaitable[Any]]) -> None:
        """One call to every active engine, side by side."""
        await self.gather({engine: call(engine) for engine in self.active})

    async def gather(self, calls: Mapping[EngineControl, Awaitable[Any]]) -> None:
        """Await all; engines whose call failed are failed, the others go on. Other errors are raised."""
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        for engine, result in zip(calls, results, strict=True):
            if isinstance(result, EngineError):
                self.fail(engine, result)
            elif isinstance(result, BaseException):
                raise result

    async def timed(self, state: str, work: Awaitable[Any]) -> Any:
        """Await, and add to the time of this state."""
        started = time.monotonic()
        try:
            return await work
        finally:
            spent = time.monotonic() - started
            self.report.seconds[state] = self.report.seconds.get(state, 0.0) + spent


class Transport:
    """One way for weights to reach engines."""

    async def has(self, snapshot: Snapshot) -> bool:
        """Whether it is still the one that can be brought."""
        raise NotImplementedError

    async def prepare(self, run: SyncRun) -> None:
        """What can be done while engines still generate."""

    async def transfer(self, run: SyncRun) -> None:
        """Bring ``run.snapshot`` into ``run.active``, between ``run.opening`` and ``run.closing``."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave the engines to themselves."""
