"""Plays groups of episodes: bounded concurrency, a pool of environments, retries of what was nobody's fault."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import gymnasium
import numpy as np

from agentrl.concurrency.backend import Backend
from agentrl.concurrency.pace import Pace
from agentrl.concurrency.threads import OwnThread, belongs_to, own_thread, release_thread
from agentrl.concurrency.together import together
from agentrl.errors import ConfigError, EngineError, describe
from agentrl.rollout.conversation import Chat, Client, EpisodeLimits
from agentrl.rollout.episode import play_episode
from agentrl.rollout.generate_hook import GenerateFunction, load_generate_function
from agentrl.rollout.sampling import check_sampling
from agentrl.types import Group, Outcome, SamplingParams, StopReason, Task, Trajectory

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_MAKE_SECONDS = 300.0
_POLL_SECONDS = 1.0

T = TypeVar("T")


@dataclass
class RunnerCounters:
    """Totals since the runner was made; seconds are summed over concurrent episodes."""

    episodes: int = 0
    retries: int = 0
    infra_errors: int = 0
    envs_made: int = 0
    engine_seconds: float = 0.0
    env_seconds: float = 0.0
    encode_seconds: float = 0.0


class Runner(Protocol):
    """Whatever plays groups of episodes of one environment."""

    async def run_group(
        self,
        task: Task,
        n: int,
        group_id: str,
        *,
        indices: Sequence[int] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Group:
        """See :meth:`EpisodeRunner.run_group`."""
        ...

    async def close(self) -> None:
        """Close the environments. Called when no group is in play."""
        ...


class EpisodeRunner(Generic[Client]):
    """Plays episodes of one environment with one policy.

    Args:
        make_env: makes an environment; called at most ``concurrency`` times save for replacements.
        concurrency: episodes at once.
        max_retries: further attempts for an episode that ended in an infra error.
        generate: a custom generate function or its name, see :mod:`agentrl.rollout.generate_hook`.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        client: Client,
        chat: Chat[Client],
        params: SamplingParams,
        limits: EpisodeLimits,
        concurrency: int,
        *,
        max_retries: int = 2,
        generate: str | GenerateFunction | None = None,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
        self._make_env, self._client, self._chat = make_env, client, chat
        self._params, self._limits = check_sampling(params), limits
        self._generate = load_generate_function(generate)
        self._max_retries = max_retries
        self._slots = asyncio.Semaphore(concurrency)
        self._idle: list[Any] = []
        self._starts = Pace()
        self._lag = LoopLag()
        self._closed = False
        self.counters = RunnerCounters()

    async def run_group(
        self,
        task: Task,
        n: int,
        group_id: str,
        *,
        indices: Sequence[int] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Group:
        """``n`` episodes of ``task``, in the order of their ids ``{group_id}-{i:03d}``.

        An episode gives one trajectory, or one for each of its agents. Those that still are infra errors after
        the retries are in the group, with their outcome: the caller drops them.

        Args:
            indices: the numbers i of the episodes to play, where those are not ``range(n)``.
            on_trajectory: called with each trajectory as it ends, in any order.

        Raises:
            LedgerError: a defect of ours; the other episodes of the group are cancelled.
            LostError: a server that tools need has been away for too long.
        """
        if self._closed:
            raise ConfigError("the runner is closed; make a new one")
        self._lag.start()

        async def one(index: int) -> list[Trajectory]:
            async with self._slots:
                await self._starts.wait()
                trajectories = await self._play(task, f"{group_id}-{index:03d}", group_id)
            if on_trajectory is not None:
                for trajectory in trajectories:
                    on_trajectory(trajectory)
            return trajectories

        with RareCollection():
            episodes = await together(map(one, range(n) if indices is None else indices))
        return Group(group_id, task, [trajectory for episode in episodes for trajectory in episode])

    async def close(self) -> None:
        """Close the idle environments. Call it when no group is running."""
        self._closed = True
        await self._lag.stop()
        idle, self._idle = self._idle, []
        await asyncio.gather(*(self._close_env(env) for env in idle))

    def metrics(self) -> dict[str, float]:
        """The counters and the event loop's lag (seconds), as one flat dict."""
        return {**asdict(self.counters), **self._lag.metrics()}

    async def _play(self, task: Task, episode_id: str, group_id: str) -> list[Trajectory]:
        """One episode, with its retries."""
        for attempt in range(self._max_retries + 1):
            if attempt:
                self.counters.retries += 1
                await asyncio.sleep(0.2 * 2**attempt * random.uniform(0.5, 1.0))
            await Backend.all_there()
            trajectories = await self._attempt(task, episode_id, group_id)
            for trajectory in trajectories:
                trajectory.info["attempt"] = attempt
                self.counters.engine_seconds += trajectory.timings["engine"]
                self.counters.env_seconds += trajectory.timings["env"]
                self.counters.encode_seconds += trajectory.timings["encode"]
            first = trajectories[0]  # the agents of an episode end for one reason
            if first.outcome is not Outcome.INFRA_ERROR or not first.info["retryable"]:
                break
            log.info("episode %s, attempt %d: %s", episode_id, attempt, first.error)
        self.counters.episodes += 1
        self.counters.infra_errors += first.outcome is Outcome.INFRA_ERROR
        return trajectories

    async def _attempt(self, task: Task, episode_id: str, group_id: str) -> list[Trajectory]:
        try:
            env = self._idle.pop() if self._idle else await self._new_env()
        except ConfigError:
            raise
        except Exception as error:  # a constructor is user code too
            return [_unstarted(task, episode_id, group_id, f"the environment could not be made: {describe(error)}")]
        reusable = False
        try:
            trajectories = await play_episode(
                env,
                task,
                client=self._client,
                chat=self._chat,
                params=self._params,
                limits=self._limits,
                trajectory_id=episode_id,
                group_id=group_id,
                generate=self._generate,
            )
            # A step that did not return may still be running in the environment.
            broken = (StopReason.ENV_ERROR, StopReason.TOOL_ERROR, StopReason.TIMEOUT, StopReason.ENGINE_TIMEOUT)
            reusable = trajectories[0].stop_reason not in broken and not self._closed
            return trajectories
        finally:
            if reusable:
                self._idle.append(env)
            else:
                await self._close_env(env)

    async def _new_env(self) -> Any:
        async with asyncio.timeout(_MAKE_SECONDS):
            thread = OwnThread()  # that of its turns: a constructor may open what is bound to a thread
            env = await thread.run(self._make_env)
        belongs_to(getattr(env, "unwrapped", env), thread)
        self.counters.envs_made += 1
        return env

    async def _close_env(self, env: gymnasium.Env[Any, Any]) -> None:
        """Close, in a thread if it blocks; what goes wrong is logged, since nothing depends on it any more."""
        close, blocking_close = getattr(env, "aclose", None), getattr(env, "close", None)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                if close is not None:
                    await close()
                elif blocking_close is not None:
                    await own_thread(getattr(env, "unwrapped", env)).run(blocking_close)
        except Exception as error:  # user code
            log.warning("closing %s: %s", type(env).__name__, describe(error))
        finally:
            release_thread(getattr(env, "unwrapped", env))


async def unless_broken(playing: asyncio.Future[T], broken: Callable[[], str | None]) -> T:
    """The result of playing episodes, unless ``broken`` says why no answer can be expected any more: they would wait
    out every deadline. They are cancelled then.
    Raises EngineError: with what ``broken`` says."""
    try:
        while not playing.done():
            await asyncio.wait([playing], timeout=_POLL_SECONDS)
            if (reason := broken()) and not playing.done():
                raise EngineError(reason)
    finally:
        if playing.cancel():
            await asyncio.wait([playing], timeout=_POLL_SECONDS)
    return await playing


class RareCollection:
    """While groups are played, Python's garbage collector looks at young objects after 50,000 new ones, not after 700.

    Trajectories are many small objects that live on, and each time their number has grown by a quarter the collector
    walks over all of them, finding nothing: a third of a turn's CPU with hundreds of episodes in flight.
    Contexts may overlap; the last to end restores what was set.
    """

    THRESHOLD: ClassVar[int] = 50_000
    _open, _lock, _before = 0, threading.Lock(), gc.get_threshold()  # of the process

    def __enter__(self) -> None:
        cls = RareCollection
        with cls._lock:
            cls._open += 1
            if cls._open == 1:
                cls._before = gc.get_threshold()
                if 0 < cls._before[0] < cls.THRESHOLD:  # 0: someone switched the collector off
                    gc.set_threshold(cls.THRESHOLD, *cls._before[1:])

    def __exit__(self, *_: object) -> None:
        cls = RareCollection
        with cls._lock:
            cls._open -= 1
            if cls._open == 0:
                gc.set_threshold(*cls._before)


class LoopLag:
    """Samples by how much the event loop is late: a blocking call in it holds up every episode."""

    def __init__(self, interval: float = 0.1, samples: int = 3000) -> None:
        self._interval = interval
        self._samples: deque[float] = deque(maxlen=samples)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling; does nothing when it runs already."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._sample())

    async def stop(self) -> None:
        """Stop sampling; the samples stay."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def metrics(self) -> dict[str, float]:
        """Seconds, over the last samples."""
        if not self._samples:
            return {"event_loop_lag_p99": 0.0, "event_loop_lag_max": 0.0}
        samples = np.array(self._samples)
        return {
            "event_loop_lag_p99": float(np.percentile(samples, 99)),
            "event_loop_lag_max": float(samples.max()),
        }

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval
            await asyncio.sleep(self._interval)
            self._samples.append(max(0.0, loop.time() - due))


def _unstarted(task: Task, trajectory_id: str, group_id: str, error: str) -> Trajectory:
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        task=task,
        segments=[],
        messages=[],
        stop_reason=StopReason.ENV_ERROR,
        error=error,
        info={"turns": [], "retryable": True},
        timings={"total": 0.0, "engine": 0.0, "env": 0.0, "encode": 0.0},
    )
