"""Plays the episodes of held-out sets that are still to be played, until they are done, time is up, or all is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.schema import EvalConfig
from agentrl.errors import EngineError
from agentrl.evaluation.heldout import HeldOutSet
from agentrl.evaluation.metrics import is_error
from agentrl.evaluation.policy import Policy
from agentrl.rollout.setup import episode_limits, eval_params, make_env
from agentrl.types import Task, Trajectory

HOPELESS = 32
"""Infrastructure errors without a single scored episode after which no more are started."""

POLL_SECONDS = 1.0

OnEpisode = Callable[[Sequence[Trajectory]], None]


@dataclass(frozen=True)
class Planned:
    """An episode to be played: sample ``number`` of ``task``. Its ids are the same in every start of an evaluation."""

    task: Task
    group_id: str
    number: int

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}-{self.number:03d}"


def plan(held_out: HeldOutSet, samples: int) -> list[Planned]:
    """All episodes of a set, first each task once, so that an evaluation cut short has seen as many tasks as it can."""
    return [
        Planned(task, f"{held_out.name}-{index:06d}", number)
        for number in range(samples)
        for index, task in enumerate(held_out.tasks)
    ]


@dataclass
class Admission:
    """Whether further episodes may start. ``deadline``: on the monotonic clock, None for no limit."""

    deadline: float | None = None
    reason: str | None = None
    _errors: int = field(default=0, repr=False)
    _scored: bool = field(default=False, repr=False)

    def open(self) -> bool:
        """False once the time is up or nothing succeeds; ``reason`` then says which."""
        if self.reason is None and self.deadline is not None and time.monotonic() >= self.deadline:
            self.reason = "the time of --eval-time-limit was up"
        return self.reason is None

    def ended(self, episode: Sequence[Trajectory]) -> None:
        """Take note of how an episode ended."""
        if not is_error(episode):
            self._scored = True
        self._errors += is_error(episode)
        if not self._scored and self._errors >= HOPELESS and self.reason is None:
            self.reason = f"the first {self._errors} episodes ended for reasons of infrastructure"


async def play_set(
    cfg: EvalConfig,
    held_out: HeldOutSet,
    policy: Policy,
    *,
    done: Collection[str],
    admission: Admission,
    on_episode: OnEpisode,
) -> None:
    """Play the episodes of ``held_out`` whose ids are not in ``done``.

    Args:
        admission: asked before each episode; those that run when it closes are played to their end.
        on_episode: called with the trajectories of each episode as it ends.

    Raises:
        EngineError: no engine is left.
        ConfigError: what is asked for cannot work at all (a key that the server refuses, say).
    """
    from agentrl.rollout.worker import EpisodeRunner

    runner = EpisodeRunner(
        lambda: make_env(held_out.spec, held_out.kwargs, tool_timeout=cfg.tool_timeout, sandbox=cfg.sandbox),
        policy.client,
        policy.chat,
        eval_params(cfg),
        episode_limits(cfg.held_out),
        cfg.rollout_concurrency,
        max_retries=cfg.max_retries,
        generate=cfg.custom_generate_function_path,
    )
    pending = (p for p in plan(held_out, cfg.n_samples_per_eval_prompt) if p.episode_id not in done)

    async def player(episodes: Iterator[Planned]) -> None:
        for planned in episodes:
            if not admission.open():
                return
            group = await runner.run_group(planned.task, 1, planned.group_id, indices=(planned.number,))
            admission.ended(group.trajectories)
            on_episode(group.trajectories)

    async def all_players() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(cfg.rollout_concurrency):
                tasks.create_task(player(pending))

    try:
        await unless_broken(all_players(), policy)
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    finally:
        await runner.close()


async def unless_broken(work: Any, policy: Policy) -> None:
    """Await ``work``, unless the policy can answer no more: episodes would then wait out every deadline.

    Raises:
        EngineError: it cannot; the text says why.
    """
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            await asyncio.wait([running], timeout=POLL_SECONDS)
            reason = policy.broken()
            if reason and not running.done():
                raise EngineError(reason)
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running], timeout=POLL_SECONDS)
    await running


def first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The first error in a group of groups."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
