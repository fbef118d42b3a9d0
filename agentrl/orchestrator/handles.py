"""The driver's two handles: the trainer's ranks and the rollout manager, both Ray actors.

Every call has a deadline, and a process that died is an error with its name and its log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.data.files import FULL, storage_errors
from agentrl.errors import AgentRLError
from agentrl.progress import Progress

POLL_S = 0.5


async def within(what: str, seconds: float, *refs: Any) -> list[Any]:
    """Results of Ray calls.

    Raises:
        AgentRLError: no result in time, or the actor died. Errors of ours raised in the actor come
            through as they are.
    """
    from ray.exceptions import RayActorError, RayTaskError

    async def one(ref: Any) -> Any:
        return await ref

    try:
        async with asyncio.timeout(seconds):
            return list(await asyncio.gather(*(one(ref) for ref in refs)))
    except TimeoutError:
        raise AgentRLError(f"{what} did not finish within {seconds:.0f} s; see the logs in the run folder") from None
    except RayTaskError as error:
        if isinstance(error.cause, AgentRLError):
            raise error.cause from None
        if isinstance(error.cause, OSError) and error.cause.errno in FULL:
            with storage_errors(error.cause.filename or what):
                raise error.cause from None
        raise AgentRLError(f"{what} failed: {one_line(error.cause)}; see the logs in the run folder") from error
    except RayActorError as error:
        raise AgentRLError(f"{what} failed: a process of the run died; see the logs in the run folder") from error


def one_line(error: BaseException) -> str:
    """An error that crossed Ray, without the stacks that Ray puts into its text."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"


class TrainerGroup:
    """All Megatron ranks. ``deadline`` is seconds for one call."""

    def __init__(self, ranks: list[Any], *, num_steps: int, deadline: float):
        self.ranks = ranks
        self.num_steps = num_steps
        self.deadline = deadline

    async def _all(self, what: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        calls = [getattr(rank, method).remote(*args, **kwargs) for rank in self.ranks]
        return await within(what, self.deadline, *calls)

    async def ready(self) -> None:
        """Wait until every rank has its model."""
        await self._all("starting the trainer", "ready")

    async def train(self, batch: list[Any]) -> dict[str, float]:
        """Train on a batch (a list that holds its reference in Ray's store); metrics of rank 0."""
        return (await self._all("the training step", "train", batch[0], num_steps=self.num_steps))[0]

    async def save(self, path: Path) -> None:
        """Every rank writes its part into ``path``."""
        await self._all("saving the trainer", "save", str(path))

    async def load(self, path: Path) -> None:
        """Every rank takes its part from ``path``."""
        await self._all("loading the trainer", "load", str(path))

    async def save_hf(self, path: Path) -> None:
        """Export the weights as an HF folder."""
        await self._all("exporting the model", "save_hf", str(path))


@dataclass(frozen=True)
class Generated:
    """One rollout: its metrics, the reference of its batch, and sentences on what was lost and which tasks dropped."""

    metrics: dict[str, float]
    batch: list[Any]
    lost: str | None = None
    dropped: str | None = None


class RolloutGroup:
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
        result = await self._watched("the rollout", self.manager.generate.remote(step), progress)
        return None if result is None else Generated(*result)

    async def evaluate(self, step: int, *, progress: Progress) -> dict[str, Any]:
        """Play the held-out sets; summaries by name. The episodes are in the trajectory store."""
        return await self._watched("the evaluation", self.manager.evaluate.remote(step), progress)

    async def update_weights(self, trainer: TrainerGroup, version: int) -> dict[str, float]:
        """Bring the engines to the trainer's weights."""
        call = self.manager.update_weights.remote(trainer.ranks, version)
        return (await within("the weight sync", self.deadline, call))[0]

    async def mark_trained(self) -> None:
        """The batch was trained on."""
        await within("the data account", self.deadline, self.manager.mark_trained.remote())

    async def hold(self) -> None:
        """Have replaced engines wait for the next sync: the trainer's ranks are about to work together."""
        await within("a replaced engine's weights", self.deadline, self.manager.hold.remote())

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return (await within("the data state", self.deadline, self.manager.state.remote()))[0]

    async def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        await within("loading the data state", self.deadline, self.manager.load_state.remote(state))

    async def close(self, seconds: float) -> None:
        """End engines and router."""
        await within("stopping the engines", seconds, self.manager.close.remote())

    async def _watched(self, what: str, call: Any, progress: Progress) -> Any:
        """Await a call, showing how far it is and the first episode of the run."""
        waiting = asyncio.ensure_future(_only(within(what, self.rollout_deadline, call)))
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=POLL_S)
                counted, example = (await within(what, self.deadline, self.manager.peek.remote()))[0]
                progress.counted(counted["done"], counted["total"])
                if example is not None:
                    progress.first_episode(example)
        finally:
            waiting.cancel()
        return await waiting


async def _only(results: Awaitable[list[Any]]) -> Any:
    return (await results)[0]
