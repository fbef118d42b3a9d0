"""The sync, under the pool that replaces engines, held against whatever may go wrong with engines while weights are on
their way: generated schedules of faults, on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.engines import pool as pool_module
from agentrl.engines.actor import SERVING
from agentrl.engines.control import PAUSE_MODES, Bucket, EngineControl
from agentrl.engines.engine import EngineSpec
from agentrl.engines.pool import EnginePool
from agentrl.errors import EngineError, WeightSyncError
from agentrl.weights.snapshot import Snapshot
from agentrl.weights.sync import WeightSync
from agentrl.weights.transports.broadcast import Broadcast
from agentrl.weights.transports.files import Files
from tests.concurrency import virtual
from tests.engines.fake_engine import FakeEngine

BUCKETS = tuple(Bucket((name,), ("float32",), ((1,),), 4) for name in "abc")
HERE = str(Path(__file__).parent)
UPDATES = ("/update_weights_from_distributed", "/update_weights_from_disk")
RECOVERY = ("/abort_request", "/end_weight_update", "/continue_generation")
SHARED = ("/pause_generation", "/flush_cache", "/weights_checker", "/health_generate", *RECOVERY)
GROUPS = ("/begin_weight_update", "/init_weights_update_group", "/destroy_weights_update_group")
ROUTES = {
    "gloo": (*SHARED, *GROUPS, *UPDATES),
    "nccl": (*SHARED, *GROUPS, *UPDATES),
    "files": (*SHARED, UPDATES[1]),
}
KINDS = ("error", "error_after", "hang", "hang_after", "late", "stop", "die", "die_after")
"""Refused, before or after it did what was asked; no answer, likewise; the answer after minutes, when nobody waits any
more; the process is stopped, for good; it dies."""
OF_WEIGHTS = ("stale", "torn")
"""It says that it loaded weights, and kept those that it had, or has others."""
LATE_S, START_S, NOTICED_S, CALL_S = 300.0, 12.0, 2.0, 0.1
STEP_S = 40.0
"""Between two versions: time for health checks, and for a new engine."""
LIMIT_S = 4000.0
"""Much more than the deadlines of three attempts, each with every state at its deadline."""


@dataclass(frozen=True)
class Fault:
    """Of the engine that is started as number ``engine``, at the ``nth`` call of a route."""

    engine: int
    route: str
    nth: int
    kind: str


@dataclass
class World:
    """What is there: the faults to come, the trainer's weights, the engines in the order of their starts."""

    faults: list[Fault]
    starts_that_fail: frozenset[int] = frozenset()
    engines: list[Engine] = field(default_factory=list)
    routed: set[str] = field(default_factory=set)
    version: int = 0
    torn: bool = False
    """An engine holds weights that are of no version. What one engine alone holds is compared with nothing."""
    shared_group: bool = False
    asked: set[asyncio.Future[Any]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def weights(self) -> str:
        return f"version {self.version}"


class Engine(FakeEngine):
    """An engine's state, and its place in the pool: stands in for ``LocalEngine``."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.number = world, len(world.engines)
        self.url = f"http://engine-{self.number}"
        self.times: Counter[str] = Counter()
        self.dead, self.stopped = asyncio.Event(), False
        world.engines.append(self)

    async def call(self, method: str, *args: Any) -> Any:
        if method == "start":
            await asyncio.sleep(START_S)
            if self.number in self.world.starts_that_fail:
                raise EngineError("it did not start, on purpose")
            return self.url
        assert method == "wait"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(args[0]):
                await self.dead.wait()
                await asyncio.sleep(NOTICED_S)
                return "the last words"
        return None

    async def end(self, grace: float = 2.0) -> None:
        faults = [fault for fault in self.world.faults if fault.engine == self.number]
        late = any(fault.kind == "late" or fault.route in RECOVERY for fault in faults)
        if self.paused and not late and not self.dead.is_set() and not self.stopped:
            self.world.problems.append(f"engine {self.number} was given up with requests that wait in it")
        # Over NCCL all share one group: who waits in it for another that failed, fails with it.
        if self.times["/abort_request"] and not (self.world.faults if self.world.shared_group else faults):
            self.world.problems.append(f"engine {self.number}, which did all that it was asked, lost requests")
        self.dead.set()

    async def take(self, path: str, body: Any) -> Any:
        """The answer to a request. Raises ConnectionError."""
        await asyncio.sleep(CALL_S)
        for each, asked in body if path == "/in_turn" else [(path, body or {})]:
            answer = await self._faulty(each, asked)
            if answer.status != 200:
                break
        return answer

    async def _faulty(self, path: str, body: dict[str, Any]) -> Any:
        await self._is_there()
        now = self.number, path, self.times[path]
        kind = next((f.kind for f in self.world.faults if (f.engine, f.route, f.nth) == now), "")
        self.times[path] += 1
        if kind == "late":
            await asyncio.sleep(LATE_S)
        if kind in ("stop", "die"):
            self._lost(kind)
        await self._is_there()
        if kind == "hang":
            await asyncio.get_running_loop().create_future()
        if kind == "error":
            return await self._fail("error", None)  # type: ignore[arg-type]  # of a connection that is not there
        before = dict(self.weights)
        answer = await (self._receive(body) if path == UPDATES[0] else self._join(body, path))
        if kind in ("stale", "torn") and path in UPDATES and answer.status == 200:
            self.weights = before if kind == "stale" else dict.fromkeys(before, f"torn {self.number}")
            whole = path == UPDATES[1] and set(before.values()) == {f"sent as version {self.world.version - 1}"}
            self.world.torn |= kind == "torn" or not whole
        if kind == "die_after":
            self._lost("die")
            await self._is_there()
        if kind == "hang_after":
            await asyncio.get_running_loop().create_future()
        return await self._fail("error", None) if kind == "error_after" else answer  # type: ignore[arg-type]

    async def _join(self, body: dict[str, Any], path: str) -> Any:
        if path == "/health_generate" and self.paused:
            await asyncio.get_running_loop().create_future()
        if path == "/init_weights_update_group" and not await SENDER[0].joined(self, body["group_name"]):
            return await self._fail("refuse", None)  # type: ignore[arg-type]
        self.suffix = f" as {self.world.weights()}"
        return await self._act(path, body)

    async def _receive(self, body: dict[str, Any]) -> Any:
        if self.session_open and not await SENDER[0].received(self, body["group_name"]):
            return await self._fail("refuse", None)  # type: ignore[arg-type]
        self.suffix = f" as {self.world.weights()}"
        return await self._act(UPDATES[0], body)

    def _lost(self, kind: str) -> None:
        self.stopped |= kind == "stop"
        if kind == "die":
            self.dead.set()

    async def _is_there(self) -> None:
        if self.dead.is_set():
            raise ConnectionRefusedError
        if self.stopped:
            await asyncio.get_running_loop().create_future()


SENDER: list[Sender] = []


class Sender:
    """Rank 0's end. A group is formed, and a bucket is through, when all its members have come."""

    def __init__(self) -> None:
        self.formed: dict[str, asyncio.Future[bool]] = {}
        self.members: dict[str, set[Engine]] = defaultdict(set)
        self.arrived: dict[str, dict[Engine, asyncio.Future[bool]]] = defaultdict(dict)
        self.sending: dict[str, asyncio.Future[bool]] = {}
        self.sizes: dict[str, int] = {}
        self.limit = 0.0

    async def joined(self, engine: Engine, name: str) -> bool:
        self.members[name].add(engine)
        formed = self.formed.setdefault(name, asyncio.get_running_loop().create_future())
        return await asyncio.shield(formed)

    async def received(self, engine: Engine, name: str) -> bool:
        if name not in self.sizes:
            return False
        came = self.arrived[name][engine] = asyncio.get_running_loop().create_future()
        self._meet(name)
        return await came

    def _meet(self, name: str) -> None:
        if name in self.sending and not self.sending[name].done() and len(self.arrived[name]) >= self.sizes[name] - 1:
            self._end(name, True)

    def _end(self, name: str, well: bool) -> None:
        waiting = [*self.arrived.pop(name, {}).values(), *([self.sending.pop(name)] if name in self.sending else [])]
        for future in waiting:
            if not future.done():
                future.set_result(well)

    async def has(self, version: int) -> bool:
        return True  # no version is published while the pool gives one

    async def listen(self) -> tuple[str, int]:
        return "127.0.0.1", 12345

    async def connect(self, groups: dict[str, int], timeout: float, bucket_timeout: float) -> dict[str, str]:
        self.limit = bucket_timeout
        await asyncio.sleep(0.5)
        states = dict.fromkeys(groups, "waiting")
        for name, size in groups.items():
            if len(self.members[name]) < size - 1:
                continue
            states[name] = "formed"
            if any(engine.dead.is_set() or engine.stopped for engine in self.members[name]):
                await asyncio.sleep(timeout)
                states[name] = "a member did not answer"
            else:
                self.sizes[name] = size
            if not self.formed[name].done():
                self.formed[name].set_result(states[name] == "formed")
        return states

    async def broadcast(self, index: int, groups: list[str]) -> dict[str, str]:
        ends = {}
        for name in groups:
            if name not in self.sizes:
                ends[name] = False
                continue
            ends[name] = self.sending[name] = asyncio.get_running_loop().create_future()
            self._meet(name)
        waiting = [end for end in ends.values() if end]
        if waiting:
            await asyncio.wait(waiting, timeout=self.limit)
        failed = {name: "no end of it" for name, end in ends.items() if not (end and end.done() and end.result())}
        for name in failed:
            await self.drop(name)
        return failed

    async def drop(self, name: str) -> None:
        self.sizes.pop(name, None)
        self._end(name, False)

    async def abort(self) -> None:
        for name in list(self.sizes):
            await self.drop(name)
        for formed in self.formed.values():
            if not formed.done():
                formed.set_result(False)


class Control(EngineControl):
    """Calls that go to an :class:`Engine` of this process."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.url, "")
        self._engine = engine

    async def _call(self, method: str, path: str, body: Any, timeout: float | None, *, accept: Any = (200,)) -> Any:
        if self.closed:
            raise EngineError(f"{self.url}{path}: it was given up")
        # It goes on with what it was asked for, also when nobody waits for the answer any more.
        asked = asyncio.ensure_future(self._engine.take(path, body))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._engine.world.asked.add(asked)
        done, _ = await asyncio.wait([asked], timeout=self._timeout if timeout is None else timeout)
        if not done:
            raise EngineError(f"{self.url}{path}: no answer")
        if asked.exception():
            raise EngineError(f"{self.url}{path}: {asked.exception()!r}")
        answer = asked.result()
        if answer.status not in accept:
            raise EngineError(f"{self.url}{path}: HTTP {answer.status}: {answer.text}")
        return answer.status, json.loads(answer.text)


class Router:
    """Which engines get requests."""

    def __init__(self, world: World, **_: Any) -> None:
        self._world, self.url, self.api_key, self.port = world, "http://router", "", 1

    def add_worker(self, url: str, key: str) -> None:
        self._world.routed.add(url)

    def remove_worker(self, url: str) -> None:
        self._world.routed.discard(url)

    async def wait(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return False

    def start(self, timeout: float) -> None: ...
    def stop(self) -> None: ...
    def is_healthy(self, timeout: float) -> bool:
        return True


class Pool(EnginePool):
    """Calls of the router are short here."""

    async def _threaded(self, function: Any, *args: Any) -> Any:
        result = function(*args)
        return await result if asyncio.iscoroutine(result) else result


@contextlib.contextmanager
def scripted(world: World) -> Iterator[None]:
    """The pool's parts, replaced by those of ``world``."""

    def control(url: str, key: str) -> Control:
        return Control(next(engine for engine in world.engines if engine.url == url))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "LocalEngine", lambda spec, **_: Engine(world))
        patch.setattr(pool_module, "EngineControl", control)
        patch.setattr(pool_module, "RouterProcess", lambda **options: Router(world, **options))
        patch.setattr(pool_module, "_WAIT_SLICE_S", LIMIT_S)
        yield


@dataclass(frozen=True)
class Case:
    faults: tuple[Fault, ...]
    number: int = 2
    way: str = "gloo"
    mode: str = "retract"
    seen_by_all: bool = True
    starts_that_fail: frozenset[int] = frozenset()
    asked_to_end: tuple[int, float] | None = None
    """In the update to which version, and after how many seconds of it."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    number, way = draw(st.integers(1, 3)), draw(st.sampled_from([*ROUTES]))
    what = st.sampled_from(
        [(r, k) for r in ROUTES[way] for k in KINDS] + [(r, k) for r in ROUTES[way] if r in UPDATES for k in OF_WEIGHTS]
    )
    engines, times = st.integers(0, number - 1) | st.integers(0, 4), st.integers(0, 2) | st.integers(0, 9)
    faults = st.builds(lambda engine, nth, what: Fault(engine, what[0], nth, what[1]), engines, times, what)
    asked_to_end = st.tuples(st.integers(1, 3), st.floats(0, 6) | st.floats(0, 150))
    return Case(
        tuple(draw(st.lists(faults, max_size=5))),
        number,
        way,
        draw(st.sampled_from(PAUSE_MODES)),
        draw(st.integers(0, 3)) > 0,
        draw(st.frozensets(st.integers(number, 6), max_size=2)),
        draw(asked_to_end) if draw(st.integers(0, 5)) == 5 else None,
    )


@settings(max_examples=100)
@given(case=cases())
@example(case=Case((Fault(0, "/pause_generation", 0, "error"),)))
def test_whatever_fails_engines_end_at_the_version_or_are_replaced(case: Case) -> None:
    ended_well = played(case)
    few = len(case.faults) + len(case.starts_that_fail) < 3  # attempts of the pool
    wrong_weights = any(fault.kind in OF_WEIGHTS for fault in case.faults)
    assert ended_well or case.asked_to_end or wrong_weights or not few, "so few faults end no run"


def test_weights_that_were_refused_are_no_measure_for_the_next_attempt() -> None:
    """Another engine fails at the same time, so that all are sent again."""
    failed = Fault(1, "/pause_generation", 2, "error")
    assert played(Case((failed, Fault(0, UPDATES[1], 2, "torn")), 3, way="files"))
    kept = [Fault(0, UPDATES[1], nth, "stale") for nth in (2, 3)]
    assert not played(Case((failed, *kept), 2, way="files")), "twice the old weights are the old weights"


def played(case: Case) -> bool:
    """See :func:`a_run`."""
    world = World(list(case.faults), case.starts_that_fail, shared_group=case.way == "nccl")
    with scripted(world):
        ended_well = virtual.run(a_run(world, case))
    assert not world.problems or case.asked_to_end
    return ended_well


async def a_run(world: World, case: Case) -> bool:
    """Three versions, and then peace; what must hold after each. Whether the run came to its end."""
    SENDER[:] = [Sender()]
    files = Files()
    transport = files if case.way == "files" else Broadcast(SENDER[0], backend=case.way)
    sync = WeightSync(transport, restore=files if case.seen_by_all else None, pause_mode=case.mode)
    pool = Pool(EngineSpec("m"), case.number)
    pool.attach(sync)
    ended_well = True
    async with asyncio.timeout(4 * LIMIT_S):
        await pool.start()
        for world.version in (1, 2, 3):
            sync.snapshot = Snapshot(world.version, HERE, BUCKETS, digest=world.version)
            ended_well = ended_well and await one_update(world, pool, case.asked_to_end)
            await asyncio.sleep(STEP_S if ended_well else 0.0)
        if ended_well:
            await peace(pool)
            assert pool.broken or SERVING in pool.states()
            # One that never starts is given up.
            assert world.starts_that_fail or world.torn or set(pool.states()) == {SERVING}
            serving_is_right(world, pool)
        async with asyncio.timeout(LIMIT_S), pool._lock:  # a new engine may be loading
            await pool.stop()
        for asked in world.asked:
            asked.cancel()
        return ended_well


async def peace(pool: Pool) -> None:
    """Until all serve, or long enough for that."""
    for _ in range(40):
        if pool.broken or set(pool.states()) == {SERVING}:
            return
        await asyncio.sleep(LIMIT_S / 40)


async def one_update(world: World, pool: Pool, asked_to_end: tuple[int, float] | None) -> bool:
    """Whether the run goes on after it."""
    updating = asyncio.ensure_future(pool.update_weights())
    if asked_to_end and asked_to_end[0] == world.version:
        await asyncio.wait([updating], timeout=asked_to_end[1])
        updating.cancel()
    try:
        async with asyncio.timeout(LIMIT_S):
            report = await updating
    except (WeightSyncError, EngineError, asyncio.CancelledError):
        pass  # the run ends
    else:
        synced = [engine for engine in world.engines if engine.url in report.synced]
        held = [set(engine.weights.values()) for engine in synced if not engine.dead.is_set()]
        right = {f"sent as {world.weights()}"}
        assert all(weights == right for weights in held) or (world.torn and len(synced) == 1), (held, right)
        if all(weights == right for weights in held):
            serving_is_right(world, pool)
            return True
    for engine in world.engines:
        if engine.url in world.routed and not engine.dead.is_set() and not engine.stopped:
            assert not engine.paused and not engine.session_open, "what is left may be asked to end its episodes"
    return False


def serving_is_right(world: World, pool: Pool) -> None:
    """Who gets requests runs, with the version's weights."""
    for engine in world.engines:
        if engine.url not in world.routed or engine.dead.is_set() or engine.stopped:
            continue
        assert engine.url in [control.url for control in pool.engines()]
        assert not engine.paused and not engine.session_open
        assert engine.version == str(world.version)
        assert set(engine.weights.values()) == {f"sent as {world.weights()}"}
