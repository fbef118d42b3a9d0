"""Rewards that judge many episodes at once, such as a reward model on the CPU or a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.concurrency.event_loop import attend
from agentrl.concurrency.threads import run_blocking
from agentrl.errors import AgentRLError, ConfigError, EnvError
from agentrl.rewards.shared import SharedReward


@dataclass(frozen=True)
class RewardItem:
    """One episode to judge: the model's final ``text``, the task's ``answer``, every text the model wrote, the calls it
    made, and the task."""

    text: str
    answer: Any = None
    turns: Sequence[str] = ()
    calls: Sequence[dict[str, Any]] = ()
    row: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Line:
    """Items that wait on one event loop, and the task that takes them."""

    waiting: list[tuple[RewardItem, asyncio.Future[Any]]] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    collector: asyncio.Task[None] | None = None


class BatchedReward(SharedReward):
    """A reward that scores batches. Subclasses define ``score``; a constructor may load a model.

    Episodes that end at about the same time are scored together; each gets its own score, or the error. A plain
    ``score`` runs in a thread, never twice at once, so the model behind it need not be thread-safe. Give the class
    or an instance as a reward; of the class there is one instance a process.

    Example:
        >>> class Brevity(BatchedReward):
        ...     def score(self, items):
        ...         return [1.0 / (1 + len(item.text)) for item in items]
        >>> Brevity(max_batch=8).max_batch
        8

    Args:
        max_batch: Replaces the class's :attr:`max_batch`; likewise ``max_wait`` and ``timeout``.

    Raises:
        ConfigError: A limit is out of range.
    """

    max_batch: int = 32
    """Most items of one batch."""
    max_wait: float = 0.05
    """Seconds the first item of a batch waits for others."""
    timeout: float = 240.0
    """Seconds a batch may take."""

    _runtime = ("_lines", "_one_at_a_time")

    def _open(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}  # of loops on which items wait
        self._one_at_a_time = threading.Lock()

    def __init__(
        self, *, max_batch: int | None = None, max_wait: float | None = None, timeout: float | None = None
    ) -> None:
        given = {"max_batch": max_batch, "max_wait": max_wait, "timeout": timeout}
        vars(self).update({name: value for name, value in given.items() if value is not None})

    def score(self, items: list[RewardItem]) -> Sequence[float | dict[str, float]]:
        """What each item is worth, in order: a number, or a dict of named parts. May be ``async``.

        Raise :class:`agentrl.InfraError` when the model cannot be asked: the episodes are tried again or left out.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `score(self, items)`.")

    async def __call__(
        self,
        text: str,
        answer: Any = None,
        *,
        turns: Sequence[str] = (),
        calls: Sequence[dict[str, Any]] = (),
        row: dict[str, Any] | None = None,
    ) -> Any:
        """The score of one episode, judged together with others.
        Raises InfraError: ``score`` raised it.
        Raises EnvError: ``score`` raised anything else, took too long, or did not return one score an item."""
        if self.max_batch < 1 or self.max_wait < 0 or self.timeout <= 0:
            raise ConfigError(
                f"{type(self).__name__}: max_batch must be at least 1, max_wait at least 0 and timeout above 0, got "
                f"{self.max_batch}, {self.max_wait} and {self.timeout}."
            )
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(loop, _Line())
        future: asyncio.Future[Any] = loop.create_future()
        line.waiting.append((RewardItem(text, answer, turns, calls, row or {}), future))
        if line.collector is None or line.collector.done():
            line.collector = loop.create_task(self._collect(loop, line))
        elif len(line.waiting) >= self.max_batch:
            line.full.set()
        return await future

    async def _collect(self, loop: asyncio.AbstractEventLoop, line: _Line) -> None:
        """Scores batch after batch while items wait."""
        try:
            while line.waiting:
                line.full.clear()
                if len(line.waiting) < self.max_batch:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(line.full.wait(), self.max_wait)
                batch, line.waiting = line.waiting[: self.max_batch], line.waiting[self.max_batch :]
                batch = [(item, future) for item, future in batch if not future.done()]  # done: nobody waits
                if batch:
                    await self._settle(batch)
        finally:
            self._lines.pop(loop, None)

    async def _settle(self, batch: list[tuple[RewardItem, asyncio.Future[Any]]]) -> None:
        try:
            scores = await self._scores([item for item, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(self._told(error))
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)

    async def _scores(self, items: list[RewardItem]) -> list[Any]:
        score = self.score
        if inspect.iscoroutinefunction(score):
            pending = attend(f"{type(self).__name__}.score", score, items)
        else:
            pending = run_blocking(self._alone, score, items)
        try:
            made = await asyncio.wait_for(pending, self.timeout)
        except TimeoutError:
            self._one_at_a_time = threading.Lock()  # the call that hangs keeps the old one
            raise EnvError(f"{type(self).__name__}.score did not return within {self.timeout:g} s") from None
        if isinstance(made, (str, bytes, dict)) or not isinstance(made, Iterable):
            raise EnvError(f"{type(self).__name__}.score must return a list of {len(items)} scores, got {made!r:.80}")
        scores = list(made)
        if len(scores) != len(items):
            raise EnvError(f"{type(self).__name__}.score must return a list of {len(items)} scores, got {len(scores)}")
        return scores

    def _alone(self, score: Any, items: list[RewardItem]) -> Any:
        with self._one_at_a_time:
            return score(items)

    def _told(self, error: BaseException) -> BaseException:
        """The error for one of several callers: each raises an object of its own."""
        if isinstance(error, AgentRLError):
            told: BaseException = type(error)(*error.args)
        elif isinstance(error, asyncio.CancelledError):
            told = EnvError(f"{type(self).__name__}.score was cancelled")
        else:
            told = EnvError(f"{type(self).__name__}.score raised {type(error).__name__}: {error}")
        told.__cause__ = error
        return told
