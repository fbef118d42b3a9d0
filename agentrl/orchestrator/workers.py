"""Where the episodes of a run are played: in the manager's own process, or in rollout workers beside it.

One Python thread makes about a thousand turns a second. A rollout worker is a process with an event loop, a client and
environments of its own; the manager then only hands out tasks and takes trajectories. Whoever plays a group, its ids
and seeds follow from the group's id, so that the batch does not depend on how many workers there are.

What crosses: a task one way; the other way a group's finished trajectories, once, in one pickle, by Ray's object store
where they are large. They are copied out of it at once, so that no trajectory that is kept holds shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import json
import logging
import os
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agentrl.concurrency.backend import Backend
from agentrl.config.schema import Config
from agentrl.data.files import to_json
from agentrl.envs.registry import make_env
from agentrl.errors import AgentRLError, DataError, describe
from agentrl.evaluation.heldout import held_out_environments
from agentrl.orchestrator.watch import until_lost, with_pulse
from agentrl.processes.pulse import WORK, Pulse
from agentrl.processes.signals import write_log_to
from agentrl.rollout.conversation import EpisodeLimits
from agentrl.rollout.options import open_chat, prepare_environments
from agentrl.rollout.policies.sglang import ClientCounters, EngineClient
from agentrl.rollout.worker import EpisodeRunner, RareCollection, Runner
from agentrl.types import Group, SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from agentrl.rollout.template.chat import ChatTemplate

log = logging.getLogger(__name__)

DEATHS = 3
"""Deaths in a row of one worker, or of the workers that had one group, that end a run."""
END_S = 12.0
"""Time for the environments of episodes that are ended to close, each of which has 10 s."""
START_S = 300.0
"""Time for a worker to start."""
ASK_S = 1.0
"""Time for a worker to say how it is."""


class Setting(NamedTuple):
    """What episodes are played in: an environment, and how the policy is sampled there."""

    name: str
    """Of the setting, unique in a run: ``train``, or a held-out set's."""
    env: str
    kwargs: dict[str, Any]
    params: SamplingParams
    limits: EpisodeLimits


class Workers(Protocol):
    """Whoever plays the episodes of a run."""

    def open(self, setting: Setting) -> Runner:
        """What plays groups in a setting; the caller closes it."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Totals since the start of the run: those of the clients, and ``replayed`` groups."""
        ...

    async def what_is_away(self) -> str:
        """The servers of tools for which episodes wait, for a person; empty where all are there."""
        ...

    async def close(self) -> None:
        """End all that is played, with its environments."""
        ...


def prepare(cfg: Config) -> None:
    """What the first episodes of a run, and of its held-out sets, would wait for; in the process that plays them."""
    prepare_environments(cfg, [cfg.env_spec(), *(held_out_environments(cfg) if cfg.eval_interval else [])])


class InProcess:
    """Plays episodes in this process; its runners share a client and a chat template."""

    def __init__(self, cfg: Config, chat: ChatTemplate, client: EngineClient, concurrency: int):
        self._cfg, self._chat, self._client, self._concurrency = cfg, chat, client, concurrency

    def open(self, setting: Setting) -> EpisodeRunner[EngineClient]:
        """See :class:`Workers`."""
        cfg = self._cfg
        return EpisodeRunner(
            lambda: make_env(setting.env, setting.kwargs, tool_timeout=cfg.tool_timeout, sandbox=cfg.sandbox),
            self._client,
            self._chat,
            setting.params,
            setting.limits,
            self._concurrency,
            generate=cfg.custom_generate_function_path,
        )

    def metrics(self) -> Mapping[str, float]:
        """See :class:`Workers`."""
        return {"replayed": 0.0, **self._client.metrics()}

    async def what_is_away(self) -> str:
        """See :class:`Workers`."""
        return Backend.what_is_away()

    async def close(self) -> None:
        """See :class:`Workers`."""
        await self._client.close()


# -- a worker ----------------------------------------------------------------------------------------------


class RolloutWorker:
    """One worker's process. An ordinary class until :class:`RayWorker` makes a Ray actor of it.

    All methods but :meth:`pulse` are coroutines of one event loop.

    Args:
        cfg: the run's configuration.
        name: what its log calls it.
        model_dir: HF folder of the tokenizer.
        address, key: of the router.
        concurrency: episodes at once.
        log_file: where its log goes, and Python's stack should it crash; None: standard error.
    """

    def __init__(
        self, cfg: Config, name: str, model_dir: str, address: str, key: str, concurrency: int, log_file: str | None
    ):
        if log_file is not None:
            write_log_to(log_file, cfg.log_level, who=name, warnings_to=Path(log_file).with_name("driver.log"))
            self._crash = open(log_file, "a")  # noqa: SIM115  # as long as the process
            faulthandler.enable(self._crash)
        self._cfg, self._model_dir = cfg, model_dir
        self._client, self._concurrency = EngineClient(address, key), concurrency
        self._runners: dict[str, EpisodeRunner[EngineClient]] = {}
        self._playing: dict[str, asyncio.Task[Group]] = {}
        self._foreign: set[str] = set()

    async def start(self) -> None:
        """Load what an episode needs. Raises the errors of each part."""
        chat = await asyncio.to_thread(open_chat, self._cfg, self._model_dir)
        self._here = InProcess(self._cfg, chat, self._client, self._concurrency)
        await asyncio.to_thread(prepare, self._cfg)
        log.info("process %d plays %d episodes at once", os.getpid(), self._concurrency)

    async def play(
        self, setting: bytes, task: bytes, n: int, group_id: str, indices: Sequence[int] | None
    ) -> tuple[bytes, dict[str, float]]:
        """A group's trajectories, packed, and the client's totals so far.
        Raises AgentRLError: as :meth:`EpisodeRunner.run_group`; what else an author's code raises is told with its
        line."""
        try:
            known, what = unpacked(setting, "the setting"), unpacked(task, f"the task of group {group_id}")
            if known.name not in self._runners:
                self._runners[known.name] = self._here.open(known)
            runner = self._runners[known.name]
            playing = asyncio.ensure_future(runner.run_group(what, n, group_id, indices=indices))
            self._playing[group_id] = playing
            try:
                group = await playing
            finally:
                del self._playing[group_id]
        except AgentRLError:
            raise
        except asyncio.CancelledError:
            raise AgentRLError(f"group {group_id} was ended") from None
        except Exception as error:
            log.exception("group %s", group_id)
            raise AgentRLError(f"group {group_id}: {describe(error)}") from None
        return self._packed(group.trajectories), self._client.metrics()

    def _packed(self, trajectories: list[Trajectory]) -> bytes:
        content, foreign = packed(trajectories)
        for kind, where in foreign.items():
            if kind not in self._foreign:
                self._foreign.add(kind)
                log.warning(
                    "%s is a %s, which stays in the worker: the manager gets its text, as the stored episode does. "
                    "Put numbers, text, lists and dicts there",
                    where, kind,
                )  # fmt: skip
        return content

    async def end(self, group_id: str) -> None:
        """Cancel a group, and wait until its environments are closed."""
        await _ended([self._playing[group_id]] if group_id in self._playing else [])

    async def close_setting(self, name: str) -> None:
        """Close the environments of a setting, none of whose groups is in play."""
        runner = self._runners.pop(name, None)
        if runner is not None:
            await runner.close()

    async def what_is_away(self) -> str:
        """See :class:`Workers`."""
        return Backend.what_is_away()

    async def lag(self) -> dict[str, float]:
        """The event loop's lag, seconds, over the last minutes."""
        lags = [runner.metrics() for runner in self._runners.values()]
        return {key: max(lag[key] for lag in lags) for key in ("event_loop_lag_p99", "event_loop_lag_max") if lags}

    async def close(self) -> None:
        """End what is played, and close the environments."""
        await _ended(list(self._playing.values()))
        for name in list(self._runners):
            await self.close_setting(name)
        await self._client.close()

    async def pulse(self, seconds: float, stall: float) -> Pulse:
        """After ``seconds``, how this process is, from another event loop; see :mod:`agentrl.orchestrator.watch`."""
        await asyncio.sleep(seconds)
        return WORK.pulse(stall)


async def _ended(playing: list[asyncio.Task[Group]]) -> None:
    for one in playing:
        one.cancel()
    if playing:
        await asyncio.wait(playing, timeout=END_S)


# -- what crosses ------------------------------------------------------------------------------------------


def packed(trajectories: list[Trajectory]) -> tuple[bytes, dict[str, str]]:
    """Trajectories of one task for another process, without their task, which that one has; and where, by its type,
    there is what no other process could read. That becomes what the stored episode has of it
    (:func:`~agentrl.data.files.to_json`)."""
    bare = [_without_task(trajectory) for trajectory in trajectories]
    stream = io.BytesIO()
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dump(bare)
    found = {kind: _place_of(value, trajectories) for kind, value in pickler.foreign.items()}
    return stream.getvalue(), found


def _without_task(trajectory: Trajectory) -> dict[str, Any]:
    return {name: value for name, value in vars(trajectory).items() if name != "task"}


def unpacked(content: bytes, what: str) -> Any:
    """Raises DataError, naming ``what``, where this process cannot read it."""
    try:
        return pickle.loads(content)  # of a process of this run
    except Exception as error:
        raise DataError(f"{what} cannot be read in another process: {type(error).__name__}: {error}") from error


def packed_task(task: Task) -> bytes:
    """A task for another process. Raises DataError: one of its options cannot go there; the text names it."""
    try:
        return pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        for key, value in task.options.items():
            try:
                pickle.dumps(value)
            except Exception as reason:
                raise DataError(
                    f"task {task.task_id}: its option {key!r} is a {type(value).__name__}, which cannot go to a "
                    f"rollout worker ({reason}). Give text, numbers, lists and dicts, or --rollout-num-workers 0."
                ) from None
        raise DataError(f"task {task.task_id} cannot go to a rollout worker: {error}") from error


class _Pickler(pickle.Pickler):
    """Writes what every process of a run can read: containers, numbers, text, arrays, ``agentrl.types``."""

    MODULES = frozenset({"numpy", "copyreg", "_codecs", "json", "builtins"})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.foreign: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Called for all but the plain objects of Python."""
        named = isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType)
        module = (obj if named else type(obj)).__module__ or ""
        if module == "agentrl.types" or (
            module.partition(".")[0] in self.MODULES and (named or module != "builtins" or isinstance(obj, _VALUES))
        ):
            return NotImplemented
        kind = type(obj)
        self.foreign.setdefault(f"{kind.__module__}.{kind.__qualname__}", obj)
        return json.loads, (to_json(obj),)


_VALUES = (complex, range, slice, bytearray)


def _place_of(value: Any, trajectories: list[Trajectory]) -> str:
    """Where an object lies in the trajectories, as their author would write it."""

    def search(inside: Any, path: str) -> str | None:
        if inside is value:
            return path
        pairs = inside.items() if isinstance(inside, dict) else enumerate(inside) if _is_list(inside) else ()
        return next((found for key, part in pairs if (found := search(part, f"{path}[{key!r}]"))), None)

    for trajectory in trajectories:
        for name in ("info", "tool_calls", "messages", "rewards", "turn_rewards", "reward"):
            if found := search(getattr(trajectory, name), name):
                return f"{found} of episode {trajectory.episode_id}"
    return "a part of an episode"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


# -- the manager's side ------------------------------------------------------------------------------------


class WorkerLostError(AgentRLError):
    """A worker's process is gone, and what was asked of it with it."""


class Worker(Protocol):
    """A worker as the pool holds it."""

    log_file: Path

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of :class:`RolloutWorker`. Raises its AgentRLError, or WorkerLostError."""
        ...

    async def lost(self) -> str:
        """Waits until the process ended or stands still; says so."""
        ...

    def kill(self) -> None:
        """End the process. Also of one that is gone."""
        ...


class RayWorker:
    """A :class:`RolloutWorker` as a Ray actor.

    Args:
        number: of the worker.
        options: Ray's, of the actor.
        patience: seconds for which it may stand still.
        args, log_file: of :class:`RolloutWorker`.
    """

    def __init__(
        self, number: int, options: Mapping[str, Any], patience: float, *args: Any, concurrency: int, log_file: Path
    ):
        self.name, self.log_file, self._patience = f"rollout worker {number}", log_file, patience
        # Groups are of one episode at least, and the pool hands out so many at most, see there.
        actor = with_pulse(RolloutWorker).options(max_concurrency=1000 + 2 * concurrency, max_restarts=0, **options)
        cfg, *where = args
        self._handle = actor.remote(cfg, f"worker {number}", *where, concurrency, str(log_file))

    async def call(self, method: str, *args: Any) -> Any:
        """See :class:`Worker`."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self._handle, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, AgentRLError):
                raise error.cause from None
            raise AgentRLError(f"{self.name}: {error.cause}; see {self.log_file}") from error
        except RayActorError as error:
            raise WorkerLostError(f"{self.name}: {error}") from error

    async def lost(self) -> str:
        """See :class:`Worker`."""
        said = await until_lost(self.name, self._handle, self.log_file, self._patience)
        return said or f"{self.name} could not be made"

    def kill(self) -> None:
        """See :class:`Worker`."""
        import ray

        ray.kill(self._handle, no_restart=True)


@dataclass
class Place:
    """A worker's place in the pool."""

    number: int
    slots: int
    """Episodes that it plays at once."""
    worker: Worker | None = None
    """None while there is none that could play."""
    playing: int = 0
    """Episodes that are its to play."""
    deaths: int = 0
    """In a row: since a group of its came back."""
    counted: Mapping[str, float] = field(default_factory=dict)


class WorkerPool:
    """Gives each group to the worker with the fewest episodes, replaces workers that die, and has others play the
    groups that were lost with them, under the same ids.

    Args:
        make: makes the worker of a place, given its number and the episodes it is to play at once.
        number: of workers.
        concurrency: episodes at once, over all workers.
    """

    def __init__(self, make: Callable[[int, int], Worker], number: int, concurrency: int):
        self._make = make
        self._places = [Place(i, concurrency // number + (i < concurrency % number)) for i in range(number)]
        # More than they play at once, so that none waits for the next group; not all of an evaluation's thousands.
        self._room = asyncio.Semaphore(2 * concurrency)
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._past: Mapping[str, float] = {"replayed": 0.0, **asdict(ClientCounters())}
        """Totals of workers that are gone."""
        self._broken: str | None = None

    async def start(self) -> None:
        """Start all workers. Raises what one of them raises."""
        made = [(place, self._make(place.number, place.slots)) for place in self._places]
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(self._begin(place, worker) for place, worker in made))
        self._keepers = [asyncio.create_task(self._keep(place, worker)) for place, worker in made]

    async def _begin(self, place: Place, worker: Worker) -> None:
        await worker.call("start")
        place.worker = worker
        self._changed.set()

    def open(self, setting: Setting) -> PoolRunner:
        """See :class:`Workers`."""
        return PoolRunner(self, setting)

    def metrics(self) -> Mapping[str, float]:
        """See :class:`Workers`."""
        return _sum(self._past, *(place.counted for place in self._places))

    async def what_is_away(self) -> str:
        """See :class:`Workers`; the first worker's word."""
        return next((said for said in await self.each("what_is_away", seconds=ASK_S) if said), "")

    async def play(
        self, setting: bytes, task: Task, n: int, group_id: str, indices: Sequence[int] | None
    ) -> list[Trajectory]:
        """The trajectories of a group, wherever it is played; again elsewhere when its worker dies.
        Raises AgentRLError: what the worker raised; or workers die again and again, with the last one's last words."""
        order, deaths = packed_task(task), 0
        async with self._room:
            while True:
                place, worker = await self._freest()
                place.playing += n
                try:
                    content, counted = await self._ask(worker, group_id, setting, order, n, group_id, indices)
                    break
                except WorkerLostError as error:
                    if place.worker is worker:
                        place.worker = None
                    worker.kill()  # a broken connection is no end yet
                    deaths += 1
                    self._past = {**self._past, "replayed": self._past["replayed"] + 1}
                    if deaths == DEATHS:
                        raise AgentRLError(
                            f"{deaths} rollout workers died while they played group {group_id} (task {task.task_id}); "
                            f"{error}{last_words(worker.log_file)}"
                        ) from None
                finally:
                    place.playing -= n
        place.deaths = 0
        if place.worker is worker and counted["requests"] >= place.counted.get("requests", 0.0):
            place.counted = counted
        trajectories = unpacked(content, f"group {group_id}")
        return [Trajectory(task=task, **fields) for fields in trajectories]

    async def _ask(self, worker: Worker, group_id: str, *args: Any) -> tuple[bytes, dict[str, float]]:
        """Have a worker play a group; cancelled, it is ended there, with its environments."""
        playing = asyncio.ensure_future(worker.call("play", *args))
        try:
            return await asyncio.shield(playing)
        except asyncio.CancelledError:
            with contextlib.suppress(AgentRLError, TimeoutError):
                async with asyncio.timeout(END_S):
                    await worker.call("end", group_id)
            playing.cancel()
            raise

    async def _freest(self) -> tuple[Place, Worker]:
        while True:
            if self._broken is not None:
                raise AgentRLError(self._broken)
            able = [(place.playing / place.slots, place.number, place) for place in self._places if place.worker]
            if able:
                place = min(able)[-1]
                assert place.worker is not None
                return place, place.worker
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, place: Place, worker: Worker) -> None:
        """Replace the worker of a place whenever it is lost, until it is lost again and again."""
        said = await worker.lost()
        while True:
            place.worker = None
            worker.kill()
            self._past, place.counted = _sum(self._past, place.counted), {}
            place.deaths += 1
            if place.deaths == DEATHS:
                self._broken = f"{said}. That is its death number {DEATHS} in a row{last_words(worker.log_file)}"
                self._changed.set()
                return
            log.warning("%s. Another takes its place, and what it played is played again", said)
            worker = self._make(place.number, place.slots)
            try:
                async with asyncio.timeout(START_S):
                    await self._begin(place, worker)
                log.info("rollout worker %d plays again", place.number)
                said = await worker.lost()
            except TimeoutError:
                said = f"rollout worker {place.number} did not start within {START_S:.0f} s"
            except AgentRLError as error:
                said = str(error)

    async def each(self, method: str, *args: Any, seconds: float = END_S) -> list[Any]:
        """Call a method of all workers that are there, within so many seconds; what they return."""

        async def one(worker: Worker) -> Any:
            with contextlib.suppress(AgentRLError, TimeoutError):
                async with asyncio.timeout(seconds):
                    return await worker.call(method, *args)

        return await asyncio.gather(*(one(place.worker) for place in self._places if place.worker))

    async def close(self) -> None:
        """See :class:`Workers`."""
        for keeper in self._keepers:
            keeper.cancel()
        await self.each("close")
        for place in self._places:
            if place.worker is not None:
                place.worker.kill()


class PoolRunner:
    """Plays groups of one setting in the workers of a pool."""

    def __init__(self, pool: WorkerPool, setting: Setting):
        self._pool, self._name = pool, setting.name
        self._setting = pickle.dumps(setting)

    async def run_group(
        self,
        task: Task,
        n: int,
        group_id: str,
        *,
        indices: Sequence[int] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Group:
        """See :class:`~agentrl.rollout.worker.Runner`; ``on_trajectory`` is called when the whole group is back."""
        with RareCollection():
            trajectories = await self._pool.play(self._setting, task, n, group_id, indices)
        if on_trajectory is not None:
            for trajectory in trajectories:
                on_trajectory(trajectory)
        return Group(group_id, task, trajectories)

    async def close(self) -> None:
        """Close the environments, in all workers."""
        await self._pool.each("close_setting", self._name)


def _sum(totals: Mapping[str, float], *others: Mapping[str, float]) -> dict[str, float]:
    return {name: value + sum(other.get(name, 0.0) for other in others) for name, value in totals.items()}


def last_words(log_file: Path, lines: int = 12) -> str:
    """The end of a log, to end an error with."""
    try:
        text = log_file.read_text(errors="replace")
    except OSError:
        return f"; see {log_file}"
    tail = "\n".join(text.splitlines()[-lines:])
    return f"; the end of {log_file}:\n{tail}"
