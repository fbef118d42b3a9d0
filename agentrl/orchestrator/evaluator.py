"""Plays the held-out sets of a run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.concurrency.together import together
from agentrl.data.store import TrajectoryStore
from agentrl.evaluation.heldout import HeldOutSet
from agentrl.evaluation.metrics import summarize
from agentrl.orchestrator.tally import EVALUATION, Tally
from agentrl.rollout.worker import Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the weights that engines hold."""

    sets: Sequence[HeldOutSet]
    samples: int
    """Episodes of each task."""
    open_runner: Callable[[HeldOutSet], Runner]
    store: TrajectoryStore
    tally: Tally
    unless_broken: Callable[[asyncio.Future[Any]], Awaitable[Any]]
    """Awaits episodes, and raises when they can come to no end."""

    async def evaluate(self, step: int) -> dict[str, dict[str, Any]]:
        """Play all sets after ``step`` rollouts; summaries by set name."""
        summaries: dict[str, dict[str, Any]] = {}
        self.tally.begin(EVALUATION, sum(len(s.tasks) for s in self.sets) * self.samples)
        for held_out in self.sets:
            runner, began = self.open_runner(held_out), time.monotonic()
            count, tag = partial(self.tally.add, EVALUATION), f"eval-{step:06d}-{held_out.name}"
            try:
                playing = together(
                    runner.run_group(task, self.samples, f"{tag}-{index:06d}", on_trajectory=count)
                    for index, task in enumerate(held_out.tasks)
                )
                groups = await self.unless_broken(asyncio.ensure_future(playing))
            finally:
                await runner.close()
            trajectories = [t for group in groups for t in group.trajectories]
            summary = summarize(held_out.name, held_out.split, trajectories, time.monotonic() - began)
            summaries[held_out.name] = summary.to_dict()
            log.info("evaluation %s after step %d: %d episodes", held_out.name, step, len(trajectories))
            await asyncio.to_thread(self.store.write, step, trajectories, name=f"eval-{held_out.name}")
        return summaries
