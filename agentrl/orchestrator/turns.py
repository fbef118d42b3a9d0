"""Whose turn it is on devices that trainer and engines share (``--colocate``).

::

            engines release, ranks start or resume
    ENGINES ───────────────────────────────────────▶ TRAINER
            ◀───────────────────────────────────────
            ranks release, engines resume and take the published weights

Engines come first: they take their share of devices that are empty. What is published is in host memory or on a disk,
so ranks need no device while engines load it. Each call has the deadline of its side, and can be made again: a move
that was broken off is made from its beginning.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from agentrl.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.orchestrator.handles import RolloutHandle, TrainerHandle
    from agentrl.weights.snapshot import Snapshot

ENGINES, TRAINER, MOVING = "engines", "trainer", "moving"


class Turns:
    """Without ``--colocate`` each side has devices of its own: then nobody waits, and nothing is released."""

    def __init__(self, cfg: Config, trainer: TrainerHandle, rollout: RolloutHandle):
        self.taken = cfg.takes_turns
        self._offload_train, self._offload_rollout = bool(cfg.offload_train), bool(cfg.offload_rollout)
        self._trainer, self._rollout = trainer, rollout
        self._whose, self._begun = ENGINES, False
        self._snapshot: Snapshot | None = None

    async def trainer(self) -> dict[str, float]:
        """From now on the trainer may work; the first time its ranks load their model. Metrics of the move."""
        if not self.taken or self._whose == TRAINER:
            return {}
        began, self._whose = time.monotonic(), MOVING
        if self._offload_rollout:
            await self._rollout.release_memory()
        released = time.monotonic()
        if not self._begun:
            self._begun = True
            await self._trainer.begin()
        await self._trainer.ready()
        if self._offload_train:
            await self._trainer.resume_memory()
        self._whose = TRAINER
        return {"time/engines_release": released - began, "time/trainer_resume": time.monotonic() - released}

    async def engines(self, snapshot: Snapshot | None = None) -> dict[str, float]:
        """From now on engines may generate, with the weights of ``snapshot``, or the last ones. Metrics of the sync."""
        if snapshot is None and (not self.taken or self._whose == ENGINES):
            return {}
        self._snapshot = wanted = self._snapshot if snapshot is None else snapshot
        if wanted is None:
            raise AgentRLError("the engines have their turn, and nothing was published for them to load")
        if not self.taken:
            return await self._rollout.update_weights(wanted)
        began, self._whose = time.monotonic(), MOVING
        if self._offload_train:
            await self._trainer.release_memory()
        released = time.monotonic() - began
        metrics = await self._rollout.update_weights(wanted)
        self._whose = ENGINES
        return metrics | {"time/trainer_release": released}
