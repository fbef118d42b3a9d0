"""Each engine loads the published files itself."""

from __future__ import annotations

from agentrl.engines.control import EngineControl, load_files
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.transports.base import SyncRun, Transport


class Disk(Transport):
    """From a folder that all engines can read: of a disk, or in the memory that they share with the trainer."""

    async def has(self, snapshot: Snapshot) -> bool:
        return snapshot.is_there()

    async def transfer(self, run: SyncRun) -> None:
        snapshot, limits = run.snapshot, run.deadlines
        load = load_files(snapshot.folder, version=snapshot.version, flush=run.flush)

        async def update(engine: EngineControl) -> None:
            await engine.in_turn([*run.opening, load, *run.closing], timeout=limits.pause + limits.disk)

        await run.each(update)
