"""Each engine loads the published files itself.

In shared memory (``ipc``) that is a mapping: an engine reads the bytes where the trainer put them and copies each once,
into its parameters, also onto a GPU. Every process of a tensor-parallel engine maps the same file and takes its part.
Handles of the trainer's GPU memory (CUDA IPC) would save nothing: a version is in host memory anyway, and the ranks may
be offloaded meanwhile.
"""

from __future__ import annotations

from agentrl.engines.control import EngineControl, load_files
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.transports.base import SyncRun, Transport


class Files(Transport):
    """From a folder that all engines can read: in the memory that they share with the trainer, or of a disk.

    One request of SGLang's does it all, so that there is no session to open and to close.
    """

    async def has(self, snapshot: Snapshot) -> bool:
        return snapshot.is_there()

    async def transfer(self, run: SyncRun) -> None:
        snapshot, limits = run.snapshot, run.deadlines
        load = load_files(snapshot.folder, version=snapshot.version, flush=run.flush)

        async def update(engine: EngineControl) -> None:
            await engine.in_turn([*run.opening, load, *run.closing], timeout=limits.pause + limits.disk)

        await run.each(update)
