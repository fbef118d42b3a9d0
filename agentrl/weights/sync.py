"""Brings engines to a published version: one state machine, a deadline on each state.

::

    prepare ─▶ transfer ─▶ verify
       └──────────┴── failure ─▶ settle

``prepare`` is done while engines generate. ``transfer`` pauses each engine, gives it the weights, sets the version and
continues it, by one of the :mod:`~agentrl.weights.transports`. ``verify`` compares what
engines hold.

What holds when :meth:`WeightSync.update` returns or raises, whatever went wrong and wherever:

- every engine of the report's ``synced`` holds the version, runs, and was compared with the others;
- every engine in ``failed`` was taken out of traffic (``retire``) and then, as far as it answers, its requests
  were aborted, its update session closed and its generation resumed. It may hold old, new or mixed
  weights and must be replaced;
- when the trainer's end failed before any weight was sent, engines run on as they were.

What is verified, without knowing how a family of models names or fuses its parameters, is SGLang's checksum of each:

- the first version is loaded by each engine after SGLang has overwritten all parameters at random: one that still is
  random was never sent. A transport other than the files is tried after them, likewise; both must give the same;
- at each version all engines must hold the same, a replacement that loaded files and engines that took a broadcast;
- where the trainer's weights differ from those before, the engines' must.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentrl.engines.control import PAUSE_MODES, EngineControl, continuing, pausing
from agentrl.engines.pool import SyncFailed, SyncReport
from agentrl.errors import EngineError, WeightSyncError, first_few
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.transports.base import Deadlines, SyncRun, Transport
from agentrl.weights.transports.files import Files

Checksums = list[dict[str, str]]
"""Of each tensor-parallel rank, by SGLang's name of the parameter."""


class WeightSync:
    """Gives engines the published weights, version after version.

    Args:
        transport: how all engines get a new version.
        restore: how a single engine that started or came back gets the current one: from files. None where it may not
            see them, on another machine: then by ``transport``.
        pause_mode: what becomes of requests in flight, see :func:`~agentrl.engines.control.pausing`.
        deadlines: seconds for each state.
        verify: compare checksums.
        retire: called with a failed engine before it is resumed: take it out of traffic.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        restore: Files | None = None,
        pause_mode: str = "retract",
        deadlines: Deadlines | None = None,
        verify: bool = True,
        retire: Callable[[EngineControl], Awaitable[None]] | None = None,
    ) -> None:
        if pause_mode not in PAUSE_MODES:
            raise ValueError(f"weight-sync pause mode {pause_mode!r}; expected one of {', '.join(PAUSE_MODES)}")
        self.transport = transport
        self.restore_from = restore
        self.pause_mode = pause_mode
        self.deadlines = deadlines or Deadlines()
        self.verify = verify
        self.retire = retire
        self.snapshot: Snapshot | None = None
        """What engines are to hold."""
        self._held: tuple[Snapshot, Checksums] | None = None
        self._tried = False

    async def update(self, engines: Sequence[EngineControl]) -> SyncReport:
        """Bring the engines to :attr:`snapshot`.
        Raises SyncFailed: the sender failed, or not one engine could be brought to the version, or an engine that
        reported success holds other weights. Its ``report`` says which engines must be replaced."""
        report = self._report()
        if not engines:
            raise SyncFailed("no engine to send weights to", report)
        ways, files = [self.transport], self.restore_from
        if self.verify and not self._tried and files is not None and files is not self.transport:
            ways.insert(0, files)
        for way in ways:
            await self._deliver(way, engines, report, tried=self._tried or not self.verify)
            engines = [engine for engine in engines if engine.url in report.synced]
        self._tried = True
        return report

    async def restore(self, engine: EngineControl) -> SyncReport | None:
        """Bring one engine to :attr:`snapshot`, beside what the ranks train. None: a new version is being published in
        its place, for which the engine waits.
        Raises SyncFailed: the engine does not take it."""
        snapshot, way = self.snapshot, self.restore_from or self.transport
        if snapshot is None or not await way.has(snapshot):
            return None
        try:
            report = await self._deliver(way, [engine], self._report(), tried=True)
        except SyncFailed:
            if await way.has(snapshot):
                raise
            return None
        return report if await way.has(snapshot) else None  # else what was sent may be of two versions

    async def close(self) -> None:
        """Leave the engines to themselves."""
        await self.transport.close()

    def _wanted(self) -> Snapshot:
        if self.snapshot is None:
            raise WeightSyncError("no version of the weights was published yet")
        return self.snapshot

    def _report(self) -> SyncReport:
        return SyncReport(self._wanted().version, nbytes=self._wanted().nbytes)

    async def _deliver(
        self, transport: Transport, engines: Sequence[EngineControl], report: SyncReport, *, tried: bool
    ) -> SyncReport:
        snapshot = self._wanted()
        run = SyncRun(
            snapshot,
            list(engines),
            self.deadlines,
            opening=(pausing(self.pause_mode),),
            closing=(continuing(),),
            flush=self.pause_mode != "in_place",  # while requests are in flight it would be refused
            report=report,
        )
        overwritten: dict[EngineControl, Checksums] = {}
        try:
            try:
                await transport.prepare(run)
                run.touched = list(run.active)
                if not tried:
                    await run.each(lambda e: e.overwrite_weights(timeout=self.deadlines.verify))
                    overwritten = await self._checksums(run)
                await run.timed("transfer", transport.transfer(run))
                run.running.update(run.active)
                run.finished = True
            finally:
                # Also on cancellation: an engine must not stay paused because somebody pressed Ctrl-C.
                await asyncio.shield(self._settle(run, transport))
            if run.active and self.verify:
                await run.timed("verify", self._verify(run, transport, overwritten))
        except SyncFailed:
            raise
        except Exception as error:
            raise SyncFailed(f"sending version {snapshot.version} failed: {error}", run.report) from error
        if not run.active:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in run.report.failed.items())
            raise SyncFailed(f"version {snapshot.version} reached no engine: {reasons}", run.report)
        run.report.synced = [engine.url for engine in run.active]
        return run.report

    async def _checksums(self, run: SyncRun) -> dict[EngineControl, Checksums]:
        held: dict[EngineControl, Checksums] = {}

        async def ask(engine: EngineControl) -> None:
            held[engine] = await engine.checksums(timeout=self.deadlines.verify)

        await run.each(ask)
        return held

    async def _verify(self, run: SyncRun, transport: Transport, overwritten: dict[EngineControl, Checksums]) -> None:
        held, version = await self._checksums(run), run.snapshot.version
        await self._settle(run, transport)
        measure: Checksums = []
        before = self._held
        if before is not None and before[0].version == version:
            measure, before = before[1], None
        for engine in run.active:
            unsent = _equal(held[engine], overwritten.get(engine, []))
            if unsent:
                raise SyncFailed(
                    f"engine {engine.url} has {len(unsent)} of {sum(map(len, held[engine]))} parameters that the "
                    f"trainer never sends ({first_few(unsent)}): engine and trainer are different models. The trainer "
                    "does not build all of what config.json asks for.",
                    run.report,
                )
            if before and before[0].digest != run.snapshot.digest and before[1] == held[engine]:
                raise SyncFailed(
                    f"engine {engine.url} still holds the weights of version {before[0].version}, which are not "
                    f"those of version {version}",
                    run.report,
                )
            measure = measure or held[engine]
            if held[engine] != measure:
                same, names = set(_equal(held[engine], measure)), [n for rank in held[engine] for n in rank]
                wrong = [name for name in names if name not in same]
                raise SyncFailed(
                    f"engine {engine.url} holds other weights as version {version} than an engine before it: "
                    f"{len(wrong)} of {len(names)} parameters differ, {first_few(wrong)}",
                    run.report,
                )
            run.report.verified = sum(map(len, held[engine]))
        if measure:
            self._held = run.snapshot, measure  # only now: what is refused is no measure for the next attempt

    async def _settle(self, run: SyncRun, transport: Transport) -> None:
        """Resume every engine that was touched and does not run; retire those that must be replaced."""
        stopped = [engine for engine in run.touched if engine not in run.running]
        if not run.finished:
            # The sync itself was broken off, by the trainer or by cancellation.
            await transport.close()
            for engine in stopped:
                run.fail(engine, "the sync broke off while its weights were being replaced")
        todo = {*stopped, *run.failed} - run.settled
        run.settled |= todo
        await asyncio.gather(*(self._resume(run, engine) for engine in todo))
        run.report.failed |= {engine.url: reason for engine, reason in run.failed.items()}

    async def _resume(self, run: SyncRun, engine: EngineControl) -> None:
        limit = self.deadlines.resume
        steps: list[Callable[[], Awaitable[Any]]] = []
        if engine in run.failed and (retire := self.retire) is not None:
            steps.append(lambda: retire(engine))
        steps.append(lambda: engine.abort(timeout=limit))
        if engine in run.touched:
            steps.append(lambda: engine.end_weight_update(timeout=limit, missing_ok=True))
        steps.append(lambda: engine.continue_(timeout=limit))
        for step in steps:
            try:
                await step()
            except EngineError as error:
                run.fail(engine, "it could not be resumed")
                run.failed[engine] += f"; then: {error}"


def _equal(one: Checksums, other: Checksums) -> list[str]:
    """Names of parameters with the same checksum on both sides."""
    return [name for a, b in zip(one, other, strict=False) for name in a if a[name] == b.get(name)]
