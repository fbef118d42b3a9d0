"""The driver's two handles: the trainer's ranks and the rollout manager, both Ray actors.

Every call has a deadline, and a process that died is an error with its name and its log.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.algorithms import TrainBatch
from agentrl.config.schema import Config, TrainerOptions
from agentrl.data.files import FULL, storage_errors
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, LostError
from agentrl.orchestrator.tally import EVALUATION, name_of_rollout
from agentrl.orchestrator.watch import SAVES, WEIGHTS, with_pulse
from agentrl.progress import Progress
from agentrl.trainer.ranks import TrainActor
from agentrl.weights.snapshot import Snapshot

if TYPE_CHECKING:
    from agentrl.orchestrator.manager import Generated

POLL_S = 0.5
START_TIMEOUT_S = 300.0
"""Longest wait for rank 0's process to be there."""


async def within(what: str, seconds: float, *refs: Any) -> list[Any]:
    """Results of Ray calls.
    Raises LostError: no result in time, the actor died, or its connection to others broke.
    Raises AgentRLError: it failed. Errors of ours raised in the actor come through as they are."""
    from ray.exceptions import RayError, RayTaskError

    try:
        async with asyncio.timeout(seconds):
            return list(await asyncio.gather(*map(_one, refs)))
    except TimeoutError:
        raise LostError(f"{what} did not finish within {seconds:.0f} s; see the logs in the run folder") from None
    except RayTaskError as error:
        if isinstance(error.cause, AgentRLError):
            raise error.cause from None
        if isinstance(error.cause, OSError) and error.cause.errno in FULL:
            with storage_errors(error.cause.filename or what):
                raise error.cause from None
        kind = LostError if is_of_a_connection(error.cause) else AgentRLError
        raise kind(f"{what} failed: {one_line(error.cause)}; see the logs in the run folder") from error
    except RayError as error:
        raise LostError(f"{what} failed: a process of the run died; see the logs in the run folder") from error


def is_of_a_connection(error: BaseException) -> bool:
    """Whether a collective of torch's failed for its connections: gloo has no error of its own."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or "gloo/transport" in str(error)


def one_line(error: BaseException) -> str:
    """An error that crossed Ray, without the stacks that Ray puts into its text."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"


async def _one(ref: Any) -> Any:
    return await ref


def create_ranks(
    cfg: Config,
    hf_checkpoint: str,
    placements: Sequence[Mapping[str, Any]],
    *,
    weights_dir: str,
    world: World | None = None,
    log_dir: str | Path | None = None,
) -> list[Any]:
    """All ranks as Ray actors, which do nothing yet: :meth:`TrainerHandle.begin` has them load their model.

    Args:
        cfg: the run's configuration.
        hf_checkpoint: directory of the model.
        placements: one dict of Ray actor options a rank.
        weights_dir: folder in which versions of the weights are published.
        world: what the run stands on; None: one machine.
        log_dir: folder for ``trainer-<rank>.log``.
    """
    threads = cfg.threads or max(1, (os.cpu_count() or 1) // len(placements))
    options = cfg.section(TrainerOptions).replace(threads=threads)
    publishing = {"bucket_bytes": cfg.update_weight_buffer_size, "folder": weights_dir}
    actor = with_pulse(TrainActor, **{WEIGHTS: 2, SAVES: 1})
    return [
        actor.options(**placement).remote(
            rank,
            len(placements),
            hf_checkpoint,
            options,
            publishing=publishing,
            nodes=cfg.actor_num_nodes,
            alone=world is None or world.is_one_machine,
            log_file=str(Path(log_dir) / f"trainer-{rank}.log") if log_dir else None,
            log_level=cfg.log_level,
        )
        for rank, placement in enumerate(placements)
    ]


class TrainerHandle:
    """All Megatron ranks. ``deadline`` is seconds for one call."""

    def __init__(self, ranks: list[Any], *, num_steps: int, deadline: float):
        self.ranks = ranks
        self.num_steps = num_steps
        self.deadline = deadline

    async def _all(self, what: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        calls = [getattr(rank, method).remote(*args, **kwargs) for rank in self.ranks]
        return await within(what, self.deadline, *calls)

    async def begin(self) -> None:
        """Have the ranks form their world, where rank 0 chooses, and load their model; does not wait for that."""
        (init_method,) = await within("starting the trainer", START_TIMEOUT_S, self.ranks[0].meeting_point.remote())
        for rank in self.ranks:
            rank.start.remote(init_method)

    async def ready(self) -> None:
        """Wait until every rank has its model."""
        await self._all("starting the trainer", "ready")

    async def fetch(self, batch: list[Any]) -> TrainBatch:
        """The batch itself (a list that holds its reference in Ray's store), as views into the store."""
        return (await within("the batch", self.deadline, batch[0]))[0]

    async def infer(self, batch: list[Any], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of a batch by name."""
        return (await self._all("the log-probabilities", "infer", batch[0], names))[0] if names else {}

    async def update(
        self, batch: list[Any], columns: Mapping[str, np.ndarray], *, keep: bool = False, critic_only: bool = False
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Train on a batch with these columns besides; metrics of rank 0, and what is kept of tokens."""
        import ray

        how = {"num_steps": self.num_steps, "keep": keep, "critic_only": critic_only}
        call = self._all("the training step", "update", batch[0], ray.put(dict(columns)), **how)
        return (await call)[0]

    async def refresh_reference(self) -> None:
        """The policy of now becomes the reference."""
        await self._all("the reference", "refresh_reference")

    async def release_memory(self) -> None:
        """Every rank gives the memory of its device back, until :meth:`resume_memory`."""
        await self._all("offloading the trainer", "release_memory")

    async def resume_memory(self) -> None:
        """Every rank has its memory again; one that had it all along goes on."""
        await self._all("loading the trainer back", "resume_memory")

    async def publish(self, version: int) -> Snapshot:
        """Have the weights of now written out as ``version``, for engines to load."""
        return (await self._all("publishing the weights", "publish", version))[0]

    async def save(self, path: Path, *, later: bool = False) -> None:
        """Every rank writes its part into ``path``, or makes a copy of it, which :meth:`write` writes."""
        await self._all("saving the trainer", "save", str(path), later=later)

    async def load(self, path: Path) -> None:
        """Every rank takes its part from ``path``."""
        await self._all("loading the trainer", "load", str(path))

    async def save_hf(self, path: Path, *, later: bool = False) -> None:
        """Export the weights as an HF folder; ``later`` as of :meth:`save`."""
        await self._all("exporting the model", "save_hf", str(path), later=later)

    async def write(self) -> None:
        """Every rank writes what it made copies of. Other calls may go on meanwhile."""
        calls = [rank.write.options(concurrency_group=SAVES).remote() for rank in self.ranks]
        await within("writing the checkpoint", self.deadline, *calls)


class RolloutHandle:
    """The rollout manager. ``deadline`` is seconds for one call, ``rollout_deadline`` for a whole batch."""

    def __init__(self, manager: Any, *, deadline: float, rollout_deadline: float):
        self.manager = manager
        self.deadline = deadline
        self.rollout_deadline = rollout_deadline

    async def start(self) -> list[str]:
        """Start engines and router, open data and environment; what a person should know of the chat template."""
        return (await within("starting the engines", self.deadline, self.manager.start.remote()))[0]

    async def generate(self, step: int, *, progress: Progress) -> Generated | None:
        """Play one batch of groups; None when there are no more tasks."""
        return await self._watched(name_of_rollout(step), self.manager.generate.remote(step), progress)

    async def evaluate(self, step: int, *, progress: Progress) -> dict[str, Any]:
        """Play the held-out sets; summaries by name. The episodes are in the trajectory store."""
        return await self._watched(EVALUATION, self.manager.evaluate.remote(step), progress)

    async def update_weights(self, snapshot: Snapshot) -> dict[str, float]:
        """Bring the engines to published weights."""
        return (await within("the weight sync", self.deadline, self.manager.update_weights.remote(snapshot)))[0]

    async def release_memory(self) -> None:
        """Have the engines give their memory back, until the next :meth:`update_weights`."""
        await within("releasing the engines' memory", self.deadline, self.manager.release_memory.remote())

    async def mark_trained(self, columns: Mapping[str, np.ndarray]) -> None:
        """The batch was trained on, with these columns."""
        await within("the data account", self.deadline, self.manager.mark_trained.remote(dict(columns)))

    async def state(self, folder: Path) -> dict[str, Any]:
        """State for a checkpoint, which also gets what is written into ``folder``."""
        return (await within("the data state", self.deadline, self.manager.state.remote(str(folder))))[0]

    async def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from a checkpoint's state, and what is in its ``folder``."""
        await within("loading the data state", self.deadline, self.manager.load_state.remote(state, str(folder)))

    async def close(self, seconds: float) -> None:
        """End engines and router."""
        await within("stopping the engines", seconds, self.manager.close.remote())

    async def _watched(self, what: str, call: Any, progress: Progress) -> Any:
        """Await a call, showing how far it is and the first episode of the run."""
        waiting = asyncio.ensure_future(_only(within(what, self.rollout_deadline, call)))
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=POLL_S)
                counted, example, away = (await within(what, self.deadline, self.manager.peek.remote(what)))[0]
                progress.counted(counted["done"], counted["total"], away)
                if example is not None:
                    progress.first_episode(example)
        finally:
            waiting.cancel()
        return await waiting


async def _only(results: Awaitable[list[Any]]) -> Any:
    return (await results)[0]
