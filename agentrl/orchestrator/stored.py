"""Stored rollouts of a run in place of new ones: ``--load-debug-rollout-data``.

What the training loop asks of rollouts is answered from the trajectories of a run folder: each step gets the batch that
was made of its rollout then, of the same groups in the same order. So the step gives the same weights, bit for bit,
where the trainer starts from the same weights with the same options. No engine, no router and no rollout manager runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.algorithms import TrainBatch, load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.data.deaths import lived
from agentrl.data.episodes import by_group, forget_training
from agentrl.data.experience import REPLAY
from agentrl.data.filters import load_filter
from agentrl.data.store import TrajectoryStore
from agentrl.errors import DataError, first_few
from agentrl.orchestrator.handles import RolloutHandle
from agentrl.orchestrator.metrics import rollout_metrics
from agentrl.orchestrator.sink import refuse_if_untrainable
from agentrl.types import Group, Trajectory

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.orchestrator.manager import Generated
    from agentrl.progress import Progress


class StoredRollouts(RolloutHandle):
    """The rollouts' end of the training loop without a manager: nothing to start, to sync with or to evaluate by.

    Args:
        cfg: the run's options; ``load_debug_rollout_data`` says whose rollouts these are.
        store: where they are stored again, with what they are trained with now. None: nowhere.

    Raises:
        DataError: there are none.
    """

    def __init__(self, cfg: Config, store: TrajectoryStore | None = None):
        super().__init__(None, deadline=math.inf, rollout_deadline=math.inf)
        self._data, self._store = Path(str(cfg.load_debug_rollout_data)), store
        folder = self._data / "trajectories"
        self._stored = TrajectoryStore(folder if folder.is_dir() else self._data, read_only=True)
        self._steps = {part.step for part in self._stored.parts("train")}
        self._algorithm = load_algorithm(cfg.section(AlgorithmOptions))
        self._size, keep = cfg.rollout_batch_size, cfg.dynamic_sampling_filter_path
        self._keep = load_filter(keep) if keep else None
        self._tokens = bool(cfg.store_train_tokens)
        self._in_training: tuple[int, TrainBatch, list[Group]] | None = None
        if not self._steps:
            raise DataError(
                f"--load-debug-rollout-data {self._data}: no stored rollout (train-000000.parquet and so on) is in it. "
                "Give a run folder, or its folder `trajectories`."
            )

    async def generate(self, step: int, *, progress: Progress) -> Generated | None:
        """The batch of the rollout that was stored at ``step``; None after the last one.
        Raises DataError: it is not there, though later ones are; or the file is torn."""
        import ray

        from agentrl.orchestrator.manager import Generated

        if step not in self._steps:
            if step > max(self._steps):
                return None
            there = first_few([str(n) for n in sorted(self._steps)])
            raise DataError(
                f"--load-debug-rollout-data {self._data}: rollout {step} is not stored, there are {there}. A run that "
                "began with a checkpoint is trained again from that one: --load RUN/checkpoints/step_N."
            )
        groups = await asyncio.to_thread(self._read, step)
        chosen = self._algorithm.select(groups)
        refuse_if_untrainable(groups, chosen, compares=self._algorithm.compares)
        batch = TrainBatch.from_groups(groups, chosen)
        self._in_training = step, batch, groups
        return Generated(rollout_metrics(groups, step), [ray.put(batch)])

    def _read(self, step: int) -> list[Group]:
        """The groups that made the batch of ``step``, in its order. Of a rollout that was not trained on: those that
        would have."""
        stored = list(self._stored.read("train", step=step))
        groups = by_group(stored)
        if any(t.advantage is not None for t in stored):
            groups = [group for group in groups if any(t.advantage is not None for t in group.trajectories)]
        else:
            groups = self._fitting([group for group in groups if lived(group)])
        again = list(self._stored.read(REPLAY, step=step))
        groups += by_group(again)
        forget_training([*stored, *again])
        return groups

    def _fitting(self, groups: list[Group]) -> list[Group]:
        if self._keep is None:
            return groups
        kept, rest = list[Group](), list[Group]()
        for group in groups:
            (kept if self._keep(group) else rest).append(group)
        return kept + rest[: max(0, self._size - len(kept))]

    async def mark_trained(self, columns: Mapping[str, np.ndarray]) -> None:
        """The optimizer has taken the last batch, with these columns: its episodes are stored with them."""
        if self._in_training is None:
            return
        (step, batch, groups), self._in_training = self._in_training, None
        trajectories: Sequence[Trajectory] = [t for group in groups for t in group.trajectories]
        batch.note_trained(trajectories, columns, tokens=self._tokens)
        if self._store is not None:
            await asyncio.to_thread(self._store.write, step, trajectories)

    async def state(self, folder: Path) -> dict[str, Any]:
        """State for a checkpoint: which rollout is next follows from its number."""
        return {"stored": str(self._data)}

    async def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from a checkpoint's state, of this run or of the one whose rollouts these are."""
