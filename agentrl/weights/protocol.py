"""What weight sync is told and what it tells: the sender as it sees it, deadlines, the report.

Nothing here imports torch: the state machine runs in a process that has no need of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.engines.control import Bucket, EngineControl, SendResult
from agentrl.errors import EngineError, WeightSyncError

UNPREDICTED = ""
"""In place of a checksum: the parameter was sent, but how the engine lays it out is not known to the sender."""


class Sender(Protocol):
    """The trainer's end, as the state machine sees it.

    Each call goes to the same-named method of :class:`~agentrl.weights.sender.WeightSender` on every
    trainer rank, and returns what rank 0 returned.
    """

    async def listen(self, host: str) -> int: ...
    async def connect(self, groups: dict[str, int], timeout: float, bucket_timeout: float) -> dict[str, str]: ...
    async def start(self) -> Bucket | None: ...
    async def broadcast(self, groups: list[str]) -> SendResult: ...
    async def checksums(self) -> list[dict[str, str]]: ...
    async def save(self, path: str) -> int: ...
    async def drop(self, name: str) -> None: ...
    async def abort(self) -> None: ...


class LocalSender:
    """A ``WeightSender`` of this process, run in worker threads, one call after the other."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = asyncio.Lock()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._sender, name)

        async def call(*args: Any) -> Any:
            # A cancelled caller does not free the sender: the call in its thread goes on.
            async with self._lock:
                return await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(method, *args)))

        return call


@dataclass(frozen=True)
class Deadlines:
    """Seconds each state may take, for one engine."""

    pause: float = 60.0
    begin: float = 30.0
    connect: float = 30.0
    bucket: float = 120.0
    disk: float = 600.0
    end: float = 60.0
    resume: float = 20.0
    verify: float = 120.0


@dataclass
class SyncReport:
    """What a sync did."""

    version: int
    synced: list[str] = field(default_factory=list)
    """Addresses of engines that hold the version and run."""
    failed: dict[str, str] = field(default_factory=dict)
    """Addresses of engines that must be replaced, with the reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by state."""
    pause_seconds: float = 0.0
    """Wall time from the first pause to the last continue: what generation lost."""
    nbytes: int = 0
    buckets: int = 0
    verified: int = 0
    """Parameters whose checksum in the engine equals the sender's."""
    unverified: tuple[str, ...] = ()
    """Parameters that were sent, whose checksum could not be predicted; equal on all engines."""


class SyncFailed(WeightSyncError):
    """A sync that brought no engine, or not rightly, to its version. ``report`` says how far it came."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass
class SyncRun:
    """The state of one sync."""

    report: SyncReport
    active: list[EngineControl]
    touched: list[EngineControl] = field(default_factory=list)  # may be paused
    open: set[EngineControl] = field(default_factory=set)  # may have an open session
    dirty: set[EngineControl] = field(default_factory=set)  # may hold part of the new weights
    running: set[EngineControl] = field(default_factory=set)  # continued
    failed: dict[EngineControl, str] = field(default_factory=dict)
    settled: set[EngineControl] = field(default_factory=set)  # failed, retired and resumed
    finished: bool = False  # came to its end, with or without failed engines

    def fail(self, engine: EngineControl, reason: object) -> None:
        """This engine must be replaced. The first reason stays."""
        if engine in self.active:
            self.active.remove(engine)
        self.failed.setdefault(engine, str(reason))

    def fail_all(self, reason: str) -> None:
        """No engine can be brought to the version."""
        for engine in list(self.active):
            self.fail(engine, reason)

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
