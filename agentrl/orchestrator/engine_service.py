"""The engines of a run as one thing: their pool, the weights they hold, and whether they still serve."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from agentrl.engines.pool import EnginePool, SyncFailed
from agentrl.engines.world import World
from agentrl.errors import EngineError, LostError, WeightSyncError
from agentrl.orchestrator.watch import WEIGHTS
from agentrl.rollout.worker import unless_broken
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.sync import WeightSync
from agentrl.weights.transports.broadcast import Broadcast
from agentrl.weights.transports.files import Files

if TYPE_CHECKING:
    from agentrl.config.schema import Config

log = logging.getLogger(__name__)

EPISODES_END_S = 12.0
"""Time for the environments of cancelled episodes to close, each of which has 10 s."""


class EngineService:
    """Brings engines to published weights, and watches over what is asked of them.

    Args:
        pool: the engines; started and stopped by others.
        sync: how they get weights.
    """

    def __init__(self, pool: EnginePool, sync: WeightSync):
        self.pool, self._sync = pool, sync
        self.version = -1
        self._playing: set[asyncio.Future[Any]] = set()
        self._ending = False
        pool.attach(sync)

    async def update_weights(self, snapshot: Snapshot) -> dict[str, float]:
        """Bring every engine to published weights; those that fail are replaced.
        Raises LostError: no engine is left, or none takes them.
        Raises WeightSyncError: engine and trainer are different models."""
        began = time.monotonic()
        self._sync.snapshot = snapshot
        try:
            report = await self.pool.update_weights()
        except EngineError as error:
            raise LostError(str(error)) from error
        except SyncFailed as error:
            raise (LostError if error.report.failed else WeightSyncError)(str(error)) from error
        self.version = snapshot.version
        times = ", ".join(f"{state} {seconds:.3f} s" for state, seconds in report.seconds.items())
        log.info("version %d: %d engines, %d bytes; %s", self.version, len(report.synced), report.nbytes, times)
        return {
            "time/sync": time.monotonic() - began,
            "sync/pause_seconds": report.seconds["transfer"],
            "sync/bytes": float(report.nbytes),
            "sync/verified": float(report.verified),
            "sync/engines": float(len(report.synced)),
        }

    async def release_memory(self) -> None:
        """Have the engines give their memory back, until the next :meth:`update_weights`."""
        began = time.monotonic()
        await self.pool.release()
        log.info("the engines gave their memory back in %.3f s", time.monotonic() - began)

    async def unless_broken(self, episodes: asyncio.Future[Any]) -> Any:
        """The result of playing episodes, unless no engine is left.
        Raises LostError: no engine is left.
        Raises EngineError: :meth:`end_episodes` was called."""
        self._playing.add(episodes)
        if self._ending:  # between two held-out sets, say
            episodes.cancel()
        try:
            return await unless_broken(episodes, lambda: self.pool.broken)
        except EngineError as error:
            raise LostError(str(error)) from error
        except asyncio.CancelledError:
            if self._ending:
                raise EngineError("the episodes were cancelled: the run is ending") from None
            raise
        finally:
            self._playing.discard(episodes)

    async def end_episodes(self) -> None:
        """Cancel what is played, so that environments are closed while engines still answer."""
        self._ending = True
        for episodes in self._playing:
            episodes.cancel()
        if self._playing:
            await asyncio.wait(self._playing, timeout=EPISODES_END_S)


class RankSender:
    """Rank 0's broadcast sender as the weight sync sees it. It works beside what the rank trains.

    Args:
        rank: handle of the Ray actor.
    """

    def __init__(self, rank: Any):
        self._rank = rank

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            return await self._rank.send.options(concurrency_group=WEIGHTS).remote(method, *args)

        return call


def weight_sync(cfg: Config, world: World, rank0: Any) -> WeightSync:
    """The way of the weights that the options ask for."""
    files, transport = Files(), world.weight_sync_transport(cfg)
    if transport != "broadcast":
        return WeightSync(files, restore=files, pause_mode=cfg.pause_mode)
    broadcast = Broadcast(RankSender(rank0), backend=world.backend, engine_ranks=world.engine_ranks(cfg))
    seen_by_all = cfg.weight_snapshot_dir is not None or world.is_one_machine
    return WeightSync(broadcast, restore=files if seen_by_all else None, pause_mode=cfg.pause_mode)
