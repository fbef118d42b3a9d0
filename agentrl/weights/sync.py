"""Brings every engine to the trainer's weights: one state machine, a deadline on each state.

::

    pack ─▶ connect ─▶ pause ─▶ begin ─▶ transfer ─▶ end ─▶ continue ─▶ verify
              └──────────┴────────┴──────────┴─────────┴── failure ─▶ resume

``pack`` fills the first bucket. ``connect`` is skipped while the group of the last sync still fits. ``transfer`` goes
by buckets; the last sets the version and flushes the prefix cache. With the disk transport the
weights are written before the pause, and ``pack``, ``connect``, ``begin`` and ``end`` fall away.

What holds when :meth:`WeightSync.sync` returns or raises, whatever went wrong and wherever:

- every engine of the report's ``synced`` holds version ``version``, runs, and was compared with what was
  sent;
- every engine in ``failed`` was taken out of traffic (``retire``) and then, as far as it answers, its requests
  were aborted, its update session closed and its generation resumed. It may hold old, new or mixed
  weights and must be replaced;
- when the trainer's end failed before any weight was sent, engines run on as they were.

Over gloo each engine has a group of its own with the sender, so one that dies or hangs costs no other
anything. Over NCCL all engines share one group, for speed; when it breaks it is formed again of
those that still answer, and the walk over the weights starts again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.engines.control import PAUSE_MODES, Bucket, EngineControl
from agentrl.errors import EngineError, WeightSyncError, first_few
from agentrl.processes.warden import scratch_folder
from agentrl.weights.groups import Groups
from agentrl.weights.protocol import UNPREDICTED, Deadlines, LocalSender, Sender, SyncFailed, SyncReport, SyncRun

__all__ = ["Deadlines", "LocalSender", "Sender", "SyncFailed", "SyncReport", "WeightSync"]

TRANSPORTS = ("broadcast", "disk")


class WeightSync:
    """Sends the trainer's weights to engines, version after version.

    Args:
        sender: the trainer's end.
        transport: ``broadcast`` (gloo or NCCL) or ``disk`` (a folder that all engines can read).
        backend: ``gloo`` or ``nccl``; must be the sender's.
        host: address under which engines reach the sender.
        engine_ranks: processes of one engine (its tensor-parallel size).
        pause_mode: what becomes of requests in flight, see :meth:`EngineControl.pause`.
        deadlines: seconds for each state.
        attempts: how often a broken shared group (NCCL) is formed again.
        verify: compare checksums after each sync.
        disk_dir: folder for the disk transport; a temporary one if ``None``.
        retire: called with a failed engine before it is resumed: take it out of traffic.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        transport: str = "broadcast",
        backend: str = "gloo",
        host: str = "127.0.0.1",
        engine_ranks: int = 1,
        pause_mode: str = "retract",
        deadlines: Deadlines | None = None,
        attempts: int = 3,
        verify: bool = True,
        disk_dir: str | Path | None = None,
        retire: Callable[[EngineControl], Awaitable[None]] | None = None,
    ) -> None:
        for what, given, known in (("transport", transport, TRANSPORTS), ("pause mode", pause_mode, PAUSE_MODES)):
            if given not in known:
                raise ValueError(f"weight-sync {what} {given!r}; expected one of {', '.join(known)}")
        self.sender = sender
        self.transport = transport
        self.pause_mode = pause_mode
        self.deadlines = deadlines or Deadlines()
        self.attempts = attempts
        self.verify = verify
        self.disk_dir = disk_dir
        self.retire = retire
        self._groups = Groups(sender, backend=backend, host=host, engine_ranks=engine_ranks, deadlines=self.deadlines)

    async def sync(self, engines: Sequence[EngineControl], version: int) -> SyncReport:
        """Bring the engines to the sender's weights under the number ``version``.

        Raises:
            SyncFailed: the sender failed, or not one engine could be brought to the version, or an engine
                that reported success holds other weights than were sent. Its ``report`` says
                which engines must be replaced.
        """
        if not engines:
            raise SyncFailed("no engine to send weights to", SyncReport(version))
        run = SyncRun(SyncReport(version), list(engines))
        try:
            try:
                if self.transport == "disk":
                    await self._sync_by_disk(run)
                else:
                    await self._sync_by_broadcast(run)
                run.finished = True
            finally:
                # Also on cancellation: an engine must not stay paused because somebody pressed Ctrl-C.
                await asyncio.shield(self._settle(run))
            if run.active and self.verify:
                await self._timed(run, "verify", self._verify(run))
        except SyncFailed:
            raise
        except Exception as error:
            raise SyncFailed(f"sending version {version} failed: {error}", run.report) from error
        if not run.active:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in run.report.failed.items())
            raise SyncFailed(f"version {version} reached no engine: {reasons}", run.report)
        run.report.synced = [engine.url for engine in run.active]
        return run.report

    async def close(self) -> None:
        """Leave the groups. Engines are left to themselves."""
        await self._groups.abandon()

    # The two ways.

    async def _sync_by_broadcast(self, run: SyncRun) -> None:
        # Whatever can be done while engines still generate is done before the pause.
        first = await self._timed(run, "pack", self.sender.start())
        if first is None:
            raise WeightSyncError("the trainer exported no weights")
        connected = await self._timed(run, "connect", self._groups.connect(run))
        started = time.monotonic()
        await self._pause(run)
        await self._timed(run, "begin", self._begin(run))
        for attempt in range(self.attempts):
            if attempt:
                first = await self._timed(run, "pack", self.sender.start())
                connected = await self._timed(run, "connect", self._groups.connect(run))
            if not run.active or (connected and await self._timed(run, "transfer", self._transfer(run, first))):
                break
            await self._groups.leave(run)
            if attempt == self.attempts - 1:
                run.fail_all(f"the weights could not be sent in {self.attempts} attempts")
        await self._timed(run, "end", self._end(run))
        await self._continue(run, started)

    async def _sync_by_disk(self, run: SyncRun) -> None:
        shared = self.disk_dir is not None
        folder = Path(tempfile.mkdtemp(prefix="weights-", dir=self.disk_dir) if shared else scratch_folder("weights-"))
        path = str(folder / f"version-{run.report.version}")
        try:
            run.report.nbytes = await self._timed(run, "save", self.sender.save(path))
            started = time.monotonic()
            await self._pause(run)
            run.dirty.update(run.active)
            load = run.each(
                lambda engine: engine.update_from_disk(
                    path,
                    version=run.report.version,
                    flush=self.pause_mode != "in_place",
                    timeout=self.deadlines.disk,
                ),
            )
            await self._timed(run, "transfer", load)
            await self._forget_prefixes(run)
            await self._continue(run, started)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # States.

    async def _pause(self, run: SyncRun) -> None:
        run.touched = list(run.active)
        pause = run.each(lambda e: e.pause(self.pause_mode, timeout=self.deadlines.pause))
        await self._timed(run, "pause", pause)

    async def _begin(self, run: SyncRun) -> None:
        run.open.update(run.active)
        await run.each(lambda e: e.begin_weight_update(timeout=self.deadlines.begin))

    async def _transfer(self, run: SyncRun, bucket: Bucket | None) -> bool:
        """Send all buckets. False if a shared group broke, so that all must be sent again."""
        report = run.report
        report.nbytes = report.buckets = 0
        while bucket is not None and run.active:
            run.dirty.update(run.active)
            group_of = self._groups.of(run.active)
            receive = {
                engine: engine.update_from_distributed(
                    bucket,
                    group_name=group_of[engine],
                    version=report.version if bucket.last else None,
                    flush=bucket.last and self.pause_mode != "in_place",
                    timeout=self.deadlines.bucket,
                )
                for engine in run.active
            }
            sending = asyncio.ensure_future(self.sender.broadcast(sorted(set(group_of.values()))))
            await run.gather(receive)
            sent = await sending
            report.nbytes += bucket.nbytes
            report.buckets += 1
            if not await self._groups.drop_failed(run, sent.failed):
                return False
            bucket = sent.next
        return True

    async def _end(self, run: SyncRun) -> None:
        await run.each(lambda e: e.end_weight_update(timeout=self.deadlines.end))
        run.open.difference_update(run.active)
        await self._forget_prefixes(run)

    async def _forget_prefixes(self, run: SyncRun) -> None:
        """Drop prefix caches of the old weights, where the update itself could not."""
        if self.pause_mode == "in_place":
            # Refused while requests are in flight; their prefixes then keep the old weights' cache.
            await run.each(lambda e: e.flush(timeout=self.deadlines.end))

    async def _continue(self, run: SyncRun, started: float) -> None:
        go_on = run.each(lambda e: e.continue_(timeout=self.deadlines.resume))
        await self._timed(run, "continue", go_on)
        run.running.update(run.active)
        run.report.pause_seconds = time.monotonic() - started

    async def _verify(self, run: SyncRun) -> None:
        held: dict[EngineControl, list[dict[str, str]]] = {}

        async def ask(engine: EngineControl) -> None:
            held[engine] = await engine.checksums(timeout=self.deadlines.verify)

        expected, _ = await asyncio.gather(self.sender.checksums(), run.each(ask))
        await self._settle(run)
        if not run.active:
            return
        reference = held[run.active[0]]
        unknown: set[str] = set()
        for engine in run.active:
            for rank, parameters in enumerate(held[engine]):
                sent = expected[rank] if rank < len(expected) else {}
                unsent = [name for name in parameters if name not in sent]
                if unsent:
                    raise SyncFailed(
                        f"engine {engine.url} has {len(unsent)} of {len(parameters)} parameters that the trainer never "
                        f"sends ({first_few(unsent)}): they would keep the values of the checkpoint, so engine and "
                        "trainer are different models. The trainer does not build all of what config.json asks for.",
                        run.report,
                    )
                unknown.update(name for name in parameters if sent[name] == UNPREDICTED)
                # What cannot be predicted must at least be equal on all engines.
                wrong = [n for n, value in parameters.items() if (sent[n] or reference[rank].get(n)) != value]
                if wrong:
                    raise SyncFailed(
                        f"engine {engine.url} holds other weights than were sent as version "
                        f"{run.report.version}: {len(wrong)} of {len(parameters)} parameters differ, "
                        f"{wrong[0]!r} first",
                        run.report,
                    )
        run.report.unverified = tuple(sorted(unknown))
        run.report.verified = sum(len(rank) for rank in reference) - len(unknown)

    # When something breaks.

    async def _settle(self, run: SyncRun) -> None:
        """Resume every engine that was touched and does not run; retire those that must be replaced."""
        stopped = [engine for engine in run.touched if engine not in run.running]
        if not run.finished:
            # The sync itself was broken off, by the trainer or by cancellation.
            await self._groups.abandon()
            for engine in stopped:
                if engine in run.dirty:
                    run.fail(engine, "the sync broke off while its weights were being replaced")
        todo = {*stopped, *run.failed} - run.settled
        run.settled |= todo
        await asyncio.gather(*(self._resume(run, engine) for engine in todo))
        run.report.failed = {engine.url: reason for engine, reason in run.failed.items()}

    async def _resume(self, run: SyncRun, engine: EngineControl) -> None:
        limit = self.deadlines.resume
        steps: list[Callable[[], Awaitable[Any]]] = []
        if engine in run.failed and self.retire is not None:
            steps.append(lambda: self.retire(engine))
        if engine in run.dirty:
            steps.append(lambda: engine.abort(timeout=limit))
        if engine in run.open:
            steps.append(lambda: engine.end_weight_update(timeout=limit, missing_ok=True))
        steps.append(lambda: engine.continue_(timeout=limit))
        for step in steps:
            try:
                await step()
            except EngineError as error:
                run.fail(engine, "it could not be resumed")
                run.failed[engine] += f"; then: {error}"

    async def _timed(self, run: SyncRun, state: str, work: Awaitable[Any]) -> Any:
        started = time.monotonic()
        try:
            return await work
        finally:
            spent = time.monotonic() - started
            run.report.seconds[state] = run.report.seconds.get(state, 0.0) + spent
