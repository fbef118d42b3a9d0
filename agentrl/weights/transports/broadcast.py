"""Rank 0 of the trainer broadcasts to all engines at once, bucket by bucket.

Over gloo each engine has a process group of its own with the sender, so that one that dies or hangs costs no other
anything. Over NCCL all engines share one, for speed; when it breaks it is formed again of those that still answer, and
everything is sent again. Groups are kept from sync to sync.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from agentrl.engines.control import BEGIN, END, Call, EngineControl, receive
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.transports.base import Deadlines, SyncRun, Transport


class Sender(Protocol):
    """Rank 0's end: the methods of :class:`~agentrl.weights.sender.BroadcastSender`, as coroutines."""

    async def has(self, version: int) -> bool: ...
    async def listen(self) -> tuple[str, int]: ...
    async def connect(self, groups: dict[str, int], timeout: float, bucket_timeout: float) -> dict[str, str]: ...
    async def broadcast(self, index: int, groups: list[str]) -> dict[str, str]: ...
    async def drop(self, name: str) -> None: ...
    async def abort(self) -> None: ...


class Broadcast(Transport):
    """Over gloo or NCCL.

    Args:
        sender: the trainer's end.
        backend: ``gloo`` or ``nccl``; must be the sender's.
        engine_ranks: processes of one engine (its tensor-parallel size).
        attempts: how often a broken shared group (NCCL) is formed again.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        backend: str = "gloo",
        engine_ranks: int = 1,
        attempts: int = 3,
    ) -> None:
        self._sender = sender
        self._backend = backend
        self._ranks = engine_ranks
        self._attempts = attempts
        self._members: dict[str, list[EngineControl]] = {}
        self._formed = False

    async def has(self, snapshot: Snapshot) -> bool:
        return await self._sender.has(snapshot.version)

    async def prepare(self, run: SyncRun) -> None:
        self._formed = await run.timed("connect", self._connect(run))

    async def transfer(self, run: SyncRun) -> None:
        for _ in range(self._attempts):
            if not self._formed:
                await self._leave(run)
                await run.each(lambda e: e.end_weight_update(timeout=run.deadlines.resume, missing_ok=True))
                self._formed = await self._connect(run)
            self._formed = self._formed and await self._send(run)
            if self._formed:
                return
        for engine in list(run.active):
            run.fail(engine, f"the weights could not be sent in {self._attempts} attempts")

    async def close(self) -> None:
        self._members = {}
        await self._sender.abort()

    async def _send(self, run: SyncRun) -> bool:
        """Send all buckets. False if a shared group broke, so that all must be sent again."""
        buckets, limits = run.snapshot.buckets, run.deadlines
        for index, bucket in enumerate(buckets):
            if not run.active:
                break
            last = index == len(buckets) - 1
            group_of = self._groups_of(run.active)
            sending = asyncio.ensure_future(self._sender.broadcast(index, sorted(set(group_of.values()))))
            before: tuple[Call, ...] = () if index else (*run.opening, BEGIN)
            after = (END, *run.closing) if last else ()
            version = run.snapshot.version if last else None
            call = receive(bucket, version=version, flush=last and run.flush)
            limit = limits.bucket + (0 if index else limits.pause)
            taking = asyncio.ensure_future(
                run.gather({e: self._take(e, name, before, call, after, limit) for e, name in group_of.items()})
            )
            try:
                await asyncio.wait([taking, sending], return_when=asyncio.FIRST_EXCEPTION)
                if not sending.done() or not sending.exception():
                    await taking
                failed = await sending
            except BaseException:
                taking.cancel()
                await self.close()  # ends what is being sent
                raise
            if not await self._drop_failed(run, failed):
                return False
        return True

    async def _take(
        self, engine: EngineControl, group: str, before: Iterable[Call], take: Call, after: Iterable[Call], limit: float
    ) -> None:
        path, body = take
        try:
            await engine.in_turn([*before, (path, body | {"group_name": group}), *after], timeout=limit)
        except BaseException:
            if len(self._members.get(group, ())) == 1:  # else it is for the others, too
                await self._sender.drop(group)  # which waits for this engine otherwise
            raise

    # Groups.

    def _groups_of(self, engines: Iterable[EngineControl]) -> dict[EngineControl, str]:
        wanted = set(engines)
        return {engine: name for name, part in self._members.items() for engine in part if engine in wanted}

    async def _connect(self, run: SyncRun) -> bool:
        """Form what groups are missing for the active engines. False if a shared one could not be formed."""
        shared = self._backend == "nccl"
        if shared and [set(part) for part in self._members.values()] != [set(run.active)]:
            await self._leave(run)
        for name, part in list(self._members.items()):
            if any(engine.closed for engine in part):  # replaced since the last sync
                del self._members[name]
                await self._sender.drop(name)
        known = self._groups_of(run.active)
        missing = [engine for engine in run.active if engine not in known]
        if not missing:
            return True
        parts = [missing] if shared else [[engine] for engine in missing]
        # Unique beyond this process: an engine may outlive a trainer, and SGLang keeps names for good.
        groups = {f"agentrl-{uuid.uuid4().hex[:16]}": part for part in parts}
        joining = await self._join(groups, run.deadlines)
        self._members |= groups
        try:
            failed = await self._form({n: [joining[e] for e in part] for n, part in groups.items()}, run.deadlines)
        except BaseException:
            for join in joining.values():
                join.cancel()
            raise
        await run.gather(joining)
        return await self._drop_failed(run, failed)

    async def _join(
        self, groups: dict[str, list[EngineControl]], limits: Deadlines
    ) -> dict[EngineControl, asyncio.Future[None]]:
        """Ask the engines to join; they wait for the sender meanwhile."""
        host, port = await self._sender.listen()
        joins: dict[EngineControl, Coroutine[Any, Any, None]] = {}
        for name, part in groups.items():
            for index, engine in enumerate(part):
                joins[engine] = engine.init_group(
                    host=host,
                    port=port,
                    rank_offset=1 + self._ranks * index,
                    world_size=1 + self._ranks * len(part),
                    group_name=name,
                    backend=self._backend,
                    timeout=limits.connect,
                )
        return {engine: asyncio.ensure_future(join) for engine, join in joins.items()}

    async def _form(self, joining: dict[str, list[asyncio.Future[None]]], limits: Deadlines) -> dict[str, str]:
        """Have the sender form each group once its engines have come; give up those where one cannot come."""
        waiting = {name: 1 + self._ranks * len(joins) for name, joins in joining.items()}
        failed = {}
        while waiting:
            states = await self._sender.connect(waiting, limits.connect, limits.bucket)
            for name, state in states.items():
                absent = [join for join in joining[name] if join.done() and join.exception()]
                if state == "waiting" and not absent:
                    continue
                del waiting[name]
                if state != "formed":
                    failed[name] = state if state != "waiting" else "an engine did not come"
        return failed

    async def _drop_failed(self, run: SyncRun, failed: dict[str, str]) -> bool:
        """Leave groups with a failed member. False if others were in one of them: then :meth:`_leave` is due."""
        shared_broke = False
        for name, part in list(self._members.items()):
            if name not in failed and not any(engine in run.failed for engine in part):
                continue
            await self._sender.drop(name)
            if len(part) == 1:
                del self._members[name]
                run.fail(part[0], f"its group with the trainer failed: {failed.get(name)}")
            else:
                shared_broke = True
        return not shared_broke

    async def _leave(self, run: SyncRun) -> None:
        """Leave all groups, the sender first, which unblocks engines that wait in one."""
        names = self._groups_of(engine for part in self._members.values() for engine in part)
        await self.close()
        gone = {engine for engine in names if engine.closed or engine in run.failed}
        await run.gather(
            {e: e.destroy_group(name, timeout=run.deadlines.resume) for e, name in names.items() if e not in gone}
        )
