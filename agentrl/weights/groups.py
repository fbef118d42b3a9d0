"""The process groups in which the sender and the engines meet.

Over gloo each engine has a group of its own with the sender, over NCCL all share one. Groups are kept from sync
to sync, and a sync of some engines leaves the groups of the others alone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable
from typing import Any

from agentrl.engines.control import EngineControl
from agentrl.weights.protocol import Deadlines, Sender, SyncRun


class Groups:
    """Forms, keeps and leaves groups. ``engine_ranks`` is the number of processes of one engine."""

    def __init__(self, sender: Sender, *, backend: str, host: str, engine_ranks: int, deadlines: Deadlines) -> None:
        self._sender = sender
        self._backend = backend
        self._host = host
        self._ranks = engine_ranks
        self._deadlines = deadlines
        self._groups: dict[str, list[EngineControl]] = {}

    def of(self, engines: Iterable[EngineControl]) -> dict[EngineControl, str]:
        """The group of each engine that has one."""
        wanted = set(engines)
        return {engine: name for name, part in self._groups.items() for engine in part if engine in wanted}

    async def connect(self, run: SyncRun) -> bool:
        """Form what groups are missing for the active engines. False if a shared one could not be formed."""
        shared = self._backend == "nccl"
        if shared and [set(part) for part in self._groups.values()] != [set(run.active)]:
            await self.leave(run)
        for name, part in list(self._groups.items()):
            if any(engine.closed for engine in part):  # replaced since the last sync
                del self._groups[name]
                await self._sender.drop(name)
        known = self.of(run.active)
        missing = [engine for engine in run.active if engine not in known]
        if not missing:
            return True
        parts = [missing] if shared else [[engine] for engine in missing]
        # Unique beyond this process: an engine may outlive a trainer, and SGLang keeps names for good.
        groups = {f"agentrl-{uuid.uuid4().hex[:16]}": part for part in parts}
        joining = await self._join(groups)
        self._groups |= groups
        try:
            failed = await self._form({name: [joining[e] for e in part] for name, part in groups.items()})
        except BaseException:
            for join in joining.values():
                join.cancel()
            raise
        await run.gather(joining)
        return await self.drop_failed(run, failed)

    async def _join(self, groups: dict[str, list[EngineControl]]) -> dict[EngineControl, asyncio.Future[None]]:
        """Ask the engines to join; they wait for the sender meanwhile."""
        port = await self._sender.listen(self._host)
        joins: dict[EngineControl, Coroutine[Any, Any, None]] = {}
        for name, part in groups.items():
            for index, engine in enumerate(part):
                joins[engine] = engine.init_group(
                    host=self._host,
                    port=port,
                    rank_offset=1 + self._ranks * index,
                    world_size=1 + self._ranks * len(part),
                    group_name=name,
                    backend=self._backend,
                    timeout=self._deadlines.connect,
                )
        return {engine: asyncio.ensure_future(join) for engine, join in joins.items()}

    async def _form(self, joining: dict[str, list[asyncio.Future[None]]]) -> dict[str, str]:
        """Have the sender form each group once its engines have come; give up those where one cannot come."""
        waiting = {name: 1 + self._ranks * len(joins) for name, joins in joining.items()}
        failed = {}
        while waiting:
            states = await self._sender.connect(waiting, self._deadlines.connect, self._deadlines.bucket)
            for name, state in states.items():
                absent = [join for join in joining[name] if join.done() and join.exception()]
                if state == "waiting" and not absent:
                    continue
                del waiting[name]
                if state != "formed":
                    failed[name] = state if state != "waiting" else "an engine did not come"
        return failed

    async def drop_failed(self, run: SyncRun, failed: dict[str, str]) -> bool:
        """Leave groups with a failed member. False if others were in one of them: then :meth:`leave` is due."""
        shared_broke = False
        for name, part in list(self._groups.items()):
            if name not in failed and not any(engine in run.failed for engine in part):
                continue
            await self._sender.drop(name)
            if len(part) == 1:
                del self._groups[name]
                run.fail(part[0], f"its group with the trainer failed: {failed.get(name)}")
            else:
                shared_broke = True
        return not shared_broke

    async def leave(self, run: SyncRun) -> None:
        """Leave all groups, the sender first, which unblocks engines that wait in one."""
        names = self.of(engine for part in self._groups.values() for engine in part)
        await self.abandon()
        gone = {engine for engine in names if engine.closed or engine in run.failed}
        leaves = {
            e: e.destroy_group(name, timeout=self._deadlines.resume) for e, name in names.items() if e not in gone
        }
        await run.gather(leaves)

    async def abandon(self) -> None:
        """Leave all groups without a word to the engines."""
        self._groups = {}
        await self._sender.abort()
