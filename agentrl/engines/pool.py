"""The engines of a run behind one router: started in parallel, watched, replaced, kept at one version.

An engine is always in one of four states::

    starting ─▶ pending ─▶ serving ─▶ dead ─▶ (a new engine) starting
                   └──────────────────▲

``pending`` engines are healthy but may hold old weights. They get no traffic: only when they have loaded those of the
current version, from what the trainer published, are they admitted to the router. A serving engine whose process
ends, or that does not answer, is taken out of the router at once and replaced. A place whose engines do not start, or
never last, is given up; the others go on.

Where engines share their devices with others, all of them can be released: they stand still without memory, are asked
for nothing, and none is started, until the next update of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.engines.actor import DEAD, PENDING, SERVING, STARTING, LocalEngine, PooledEngine, RayEngine
from agentrl.engines.control import EngineControl
from agentrl.engines.engine import EngineSpec
from agentrl.engines.router import RouterProcess
from agentrl.errors import EngineError, WeightSyncError
from agentrl.processes.network import machine_answers
from agentrl.processes.server import new_api_key

log = logging.getLogger(__name__)

_WAIT_SLICE_S = 5.0
_ROUTER_ATTEMPTS = 20
_LASTS_S = 60.0
"""An engine that fails within so many seconds of taking requests never lasted."""
_RELEASE_S = 120.0
"""Longest wait for an engine to give its memory back, or to have it again."""
_PROBE_S = 5.0
"""Longest wait for a machine to answer that a port is closed."""


@dataclass
class SyncReport:
    """What a sync of weights did."""

    version: int
    synced: list[str] = field(default_factory=list)
    """Addresses of engines that hold the version and run."""
    failed: dict[str, str] = field(default_factory=dict)
    """Addresses of engines that must be replaced, with the reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by state; ``transfer`` is what generation lost."""
    nbytes: int = 0
    verified: int = 0
    """Parameters whose checksums were compared."""


class SyncFailed(WeightSyncError):
    """A sync that came to no right end. ``report`` says how far it came."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


class Updater(Protocol):
    """Who gives engines their weights. Raises :class:`SyncFailed`.

    ``retire`` is set by the pool: called with a failed engine before that one generates again.
    """

    retire: Callable[[EngineControl], Awaitable[None]] | None

    async def update(self, engines: Sequence[EngineControl]) -> SyncReport:
        """Bring all of them to the newest version."""
        ...

    async def restore(self, engine: EngineControl) -> SyncReport | None:
        """Bring one that started or came back to the newest version; None: it must wait for the next :meth:`update`."""
        ...


class EnginePool:
    """``n`` engines and their router. All methods are coroutines of one event loop.

    Args:
        spec: what every engine serves.
        n: number of engines.
        log_dir: folder for ``engine-<i>.log`` and ``router.log``.
        policy: of the router, see :mod:`agentrl.engines.router`.
        host: address the engines listen on; where it is not loopback, each listens on that of its own machine.
        router_host: that of the router, which has paths that ask for no key: loopback unless it has clients elsewhere.
        start_timeout: seconds an engine may take to start.
        ray_options: one dict of Ray actor options per engine; ``None`` runs the engines without Ray.
        health_interval: seconds between two checks that an engine can generate; 0 for none. That a
            process ended is noticed at once and without checks.
        health_timeout: seconds such a check may take. Two failures in a row make an engine dead.
        max_failed_starts: engines in a row that may fail to start, or never last, before their place is given up.
        min_engines: with fewer places than so many the pool serves no more.
    """

    def __init__(
        self,
        spec: EngineSpec,
        n: int,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        policy: str = "consistent_hashing",
        host: str = "127.0.0.1",
        router_host: str = "127.0.0.1",
        start_timeout: float = 300.0,
        ray_options: Sequence[dict[str, Any]] | None = None,
        health_interval: float = 15.0,
        health_timeout: float = 45.0,
        max_failed_starts: int = 3,
        min_engines: int = 1,
    ) -> None:
        if n < 1 or (ray_options is not None and len(ray_options) != n):
            given = "" if ray_options is None else f" with {len(ray_options)} Ray options; give one an engine"
            raise EngineError(f"a pool of {n} engines{given}; expected at least one")
        self.spec = spec
        self.host = host
        self.start_timeout = start_timeout
        self.health_interval = health_interval
        self.health_timeout = health_timeout
        self.max_failed_starts, self.min_engines = max_failed_starts, min_engines
        self._log_dir = None if log_dir is None else os.fspath(log_dir)
        self._ray_options = ray_options
        self._engine_key = new_api_key()
        self._new_router = functools.partial(RouterProcess, policy=policy, log_dir=self._log_dir, host=router_host)
        self._router = self._new_router()
        self._places = [PooledEngine(index) for index in range(n)]
        # Its own threads: the loop's few default ones may all be taken by something that blocks.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="agentrl-router")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()  # held while weights are on their way
        self._room = asyncio.Event()  # the devices are the engines', also for one that is to start
        self._room.set()
        self._changed = asyncio.Condition()
        self._updater: Updater | None = None
        self._updated = False
        self._stopped = False
        self._broken: str | None = None

    # What others need to know.

    @property
    def broken(self) -> str | None:
        """Why the pool can serve no more, if so. Requests in flight then never succeed."""
        return self._broken

    @property
    def router_url(self) -> str:
        """Where requests go."""
        return self._router.url

    @property
    def router_key(self) -> str:
        """The bearer key of the router."""
        return self._router.api_key

    def engines(self, *states: str) -> list[EngineControl]:
        """Control of the engines in the given states, by default ``serving``."""
        return [place.control for place in self._places if place.control and place.state in (states or (SERVING,))]

    def states(self) -> list[str]:
        """State of each place."""
        return [place.state for place in self._places]

    # Life.

    async def start(self) -> None:
        """Start router and engines, in parallel. The engines serve the checkpoint's own weights.
        Raises EngineError: one of them did not start. Nothing is left running."""
        try:
            results = await asyncio.gather(
                self._threaded(self._router.start, self.start_timeout),
                *(self._fill(place) for place in self._places),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            await asyncio.gather(*(self._admit(place) for place in self._places))
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        self._spawn(self._watch_router())
        if self.health_interval > 0:
            self._spawn(self._check_health())

    async def stop(self) -> None:
        """End engines and router. Idempotent; never takes long."""
        if self._stopped:
            return
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ends = [place.engine.end() for place in self._places if place.engine]
        results = await asyncio.gather(*ends, self._threaded(self._router.stop), return_exceptions=True)
        for place in self._places:
            place.state, place.engine = DEAD, None
            if place.control:
                await place.control.close()
                place.control = None
        self._threads.shutdown(wait=False)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def wait_until_broken(self) -> str:
        """Wait until the pool can serve no more; the reason, see :attr:`broken`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._broken)
        return str(self._broken)

    # Weights.

    def attach(self, updater: Updater) -> None:
        """Have the pool use this for weights. A failed engine is out of the router before it is resumed."""
        self._updater = updater
        updater.retire = self._retire

    async def update_weights(self) -> SyncReport:
        """Bring all engines to the newest weights; those that fail are replaced.

        Replacements that are ready are admitted. If no engine is left, waits for one.

        Raises WeightSyncError: the trainer's end failed, or engines fail again and again.
        Raises EngineError: no engine can be started."""
        if self._updater is None:
            raise EngineError("nobody gives the pool weights; call attach() first")
        async with self._lock:
            self._updated = True
            self._room.set()
            for attempt in range(self.max_failed_starts):
                engines = await self._wait_for_engines()
                if not (engines := await self._each(engines, lambda e: e.resume(timeout=_RELEASE_S))):
                    continue
                try:
                    report = await self._updater.update(engines)
                except SyncFailed as error:
                    self._replace_failed(error.report)
                    if attempt == self.max_failed_starts - 1 or not error.report.failed:
                        raise
                    continue
                self._replace_failed(report)
                await asyncio.gather(*(self._admit(p) for p in self._of(report.synced) if p.state == PENDING))
                return report
        raise EngineError(f"{self.max_failed_starts} times in a row no engine had its memory again")

    async def release(self) -> None:
        """Have all engines give their memory back, until the next :meth:`update_weights`. One that does not is ended;
        another takes its place when there is room again. Returns when the memory is free."""
        async with self._lock:
            self._room.clear()
            async with self._changed:  # one that starts has memory, too
                await self._changed.wait_for(lambda: STARTING not in self.states())
            await self._each(self.engines(SERVING, PENDING), lambda e: e.release(timeout=_RELEASE_S))
            if ending := [place.ending for place in self._places if place.ending is not None]:
                await asyncio.wait(ending)  # one that died before has memory until it is gone

    async def _each(
        self, engines: Sequence[EngineControl], call: Callable[[EngineControl], Awaitable[None]]
    ) -> list[EngineControl]:
        """Those that did as they were asked. Others are replaced, and have ended by now."""
        results = await asyncio.gather(*map(call, engines), return_exceptions=True)
        ends = list[Awaitable[None]]()
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, EngineError):
                ends += filter(None, [self._replace(place, str(result)) for place in self._of([engine.url])])
            elif isinstance(result, BaseException):
                raise result
        await asyncio.gather(*ends)
        return [engine for engine, result in zip(engines, results, strict=True) if result is None]

    async def _wait_for_engines(self) -> list[EngineControl]:
        async with self._changed:
            try:
                async with asyncio.timeout(self.start_timeout):
                    await self._changed.wait_for(lambda: self._broken or self.engines(SERVING, PENDING))
            except TimeoutError:
                raise EngineError(f"no engine came up within {self.start_timeout:g} s") from None
        if self._broken:
            raise EngineError(self._broken)
        return self.engines(SERVING, PENDING)

    def _of(self, urls: Sequence[str]) -> list[PooledEngine]:
        return [place for place in self._places if place.control and place.control.url in urls]

    def _replace_failed(self, report: SyncReport) -> None:
        for place in self._places:
            if place.control and place.control.url in report.failed:
                self._replace(place, report.failed[place.control.url])

    # One engine.

    async def _fill(self, place: PooledEngine) -> LocalEngine | RayEngine:
        """Start an engine in this place; pending afterwards, if it still lives."""
        await self._room.wait()
        began = time.monotonic()
        place.state, spec = STARTING, place.own(self.spec, len(self._places), placed=self._ray_options is not None)
        arguments = {"name": place.name, "log_dir": self._log_dir, "host": self.host, "api_key": self._engine_key}
        if self._ray_options is None:
            place.engine = LocalEngine(spec, **arguments)
        else:
            place.engine = RayEngine(self._ray_options[place.index], spec, **arguments)
        engine = place.engine
        async with asyncio.timeout(self.start_timeout + 60.0):
            url = await engine.call("start", self.start_timeout)
        log.info("%s runs at %s after %.1f s", place.name, url, time.monotonic() - began)
        place.control = EngineControl(url, self._engine_key)
        place.watch = self._spawn(self._watch(place, engine))
        await self._set_state(place, PENDING, engine)
        return engine

    async def _admit(self, place: PooledEngine) -> None:
        engine, control = place.engine, place.control
        if control is None:  # it died; its watch replaces it
            return
        await self._threaded(self._router.add_worker, control.url, self._engine_key)
        if place.engine is engine:
            log.info("%s takes requests", place.name)
            place.served_at = place.served_at or time.monotonic()
            await self._set_state(place, SERVING, engine)
        else:
            await self._threaded(self._router.remove_worker, control.url)

    async def _retire(self, control: EngineControl) -> None:
        """Out of the router; called for an engine whose weights are not right."""
        for place in self._of([control.url]):
            place.state = DEAD
        await self._threaded(self._router.remove_worker, control.url)

    async def _watch(self, place: PooledEngine, engine: LocalEngine | RayEngine) -> None:
        """Wait for the engine's process to end by itself."""
        try:
            tail = None
            while tail is None:
                tail = await engine.call("wait", _WAIT_SLICE_S)
            reason = f"its process, or one that it needs, ended:\n{tail}"
        except EngineError as error:
            reason = str(error)
        if place.engine is engine:
            self._replace(place, reason)

    def _replace(self, place: PooledEngine, reason: str) -> asyncio.Task[None] | None:
        """Take the engine out and start another in its place, in the background. The result ends when the old one is
        gone."""
        if self._stopped or place.engine is None:
            return None
        lasted = place.served_at is not None and time.monotonic() - place.served_at > _LASTS_S
        place.failed, place.served_at = 0 if lasted else place.failed + 1, None
        ended = self._empty(place)
        if place.failed >= self.max_failed_starts:
            why = f"engines failed {place.failed} times in a row within {_LASTS_S:g} s of taking requests: {reason}"
            self._spawn(self._give_up(place, why, ended))
        else:
            log.warning("%s is replaced: %s", place.name, reason)
            self._spawn(self._replacing(place, ended))
        return ended

    def _empty(self, place: PooledEngine) -> asyncio.Task[None]:
        """Empty the place now; the result ends when what is left of its engine is gone."""
        engine, control, of = place.engine, place.control, place.name
        if place.watch is not None and place.watch is not asyncio.current_task():
            place.watch.cancel()
        place.state, place.engine, place.control, place.watch = DEAD, None, None, None

        async def end() -> None:
            if control is not None:
                try:
                    await self._threaded(self._router.remove_worker, control.url)
                except EngineError as error:
                    log.warning("%s: %s", place.name, error)
                await control.close()
                if self._ray_options and not await self._threaded(machine_answers, control.url, _PROBE_S):
                    log.warning("the machine of %s is cut off; the router would wait for it, and is started again", of)
                    await self._renew_router()
            if engine is not None:
                await engine.end(grace=0.0)  # it failed, and its requests wait for the next one

        place.ending = self._spawn(end())
        return place.ending

    async def _replacing(self, place: PooledEngine, end_old: Awaitable[None]) -> None:
        await end_old
        for attempt in range(self.max_failed_starts):
            place.incarnation += 1
            engine = None
            try:
                engine = await self._fill(place)
                return await self._bring_up(place, engine)
            except (EngineError, OSError) as error:  # a deadline that passed is an OSError
                log.warning("%s did not come up (%d): %s", place.name, attempt + 1, error)
                if engine is not None and place.engine is not engine:
                    return  # its process ended meanwhile, and its watch replaces it
                await self._empty(place)
                await self._set_state(place, DEAD, None)
        await self._give_up(place, f"{self.max_failed_starts} replacements in a row did not start")

    async def _give_up(self, place: PooledEngine, why: str, end_old: Awaitable[None] | None = None) -> None:
        place.given_up = True
        left = sum(not other.given_up for other in self._places)
        log.error("%s is given up, %d of %d engines are left: %s", place.name, left, len(self._places), why)
        if end_old is not None:
            await end_old
        await self._set_state(place, DEAD, None)
        if left < self.min_engines:
            least = f" of at least {self.min_engines}" if self.min_engines > 1 else ""
            await self._break(f"{left or 'no'} engines{least} are left; of the last, {why}")

    async def _bring_up(self, place: PooledEngine, engine: LocalEngine | RayEngine) -> None:
        """Admit a replacement, with the current weights if weights were ever given."""
        async with self._lock:
            if place.engine is not engine or place.control is None or place.state != PENDING:
                return
            if not self._room.is_set():
                return  # it was released with the others, and gets its weights with them
            if self._updater is not None and self._updated:
                try:
                    if await self._updater.restore(place.control) is None:
                        log.info("%s waits for the next version of the weights", place.name)
                        return
                    log.info("%s loaded the published weights", place.name)
                except WeightSyncError as error:
                    raise EngineError(str(error)) from error
            await self._admit(place)

    async def _break(self, reason: str) -> None:
        log.error("%s", reason)
        self._broken = reason
        async with self._changed:
            self._changed.notify_all()

    async def _set_state(self, place: PooledEngine, state: str, engine: LocalEngine | RayEngine | None) -> None:
        async with self._changed:
            if place.engine is engine:
                place.state = state
            self._changed.notify_all()

    # Watching.

    async def _check_health(self) -> None:
        """Find engines that run but do not answer. Not while weights are on their way, or they are released: then they
        are paused."""
        misses: dict[str, int] = {}
        while True:
            await asyncio.sleep(self.health_interval)
            if self._stand():
                misses.clear()
                continue
            serving = [(place, place.control) for place in self._places if place.control and place.state == SERVING]
            answers = await asyncio.gather(*(c.can_generate(timeout=self.health_timeout) for _, c in serving))
            if self._stand():
                continue  # a pause began while we asked
            for (place, control), answer in zip(serving, answers, strict=True):
                if place.control is not control:
                    continue
                url = control.url
                misses[url] = 0 if answer else misses.get(url, 0) + 1
                if misses[url] >= 2:
                    self._replace(place, f"it did not answer two health checks of {self.health_timeout:g} s")

    def _stand(self) -> bool:
        return self._lock.locked() or not self._room.is_set()

    async def _watch_router(self) -> None:
        """Start the router again, at the same address and with the same key, should it end or answer no more."""
        while True:
            misses = 0
            while misses < 2 and not await self._threaded(self._router.wait, _WAIT_SLICE_S):
                answers = not self.health_interval or await self._threaded(
                    self._router.is_healthy, self.health_timeout
                )
                misses = 0 if answers else misses + 1
            what = "ended" if misses < 2 else f"did not answer two health checks of {self.health_timeout:g} s"
            log.warning("the router %s and is started again:\n%s", what, self._router.log_tail())
            if not await self._restart_router():
                return await self._break(f"the router ended and could not be started again at {self.router_url}")
            for place in self._places:
                if place.state == SERVING:
                    try:
                        await self._admit(place)
                    except EngineError as error:  # if the engine is dead, its own watch replaces it
                        log.warning("%s: %s", place.name, error)

    async def _renew_router(self) -> None:
        """End the router, and with it its connections; return when its watch has started it again."""
        old = self._router
        await self._threaded(old.stop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.start_timeout):
                while self._router is old or not await self._threaded(self._router.is_healthy, _PROBE_S):
                    await asyncio.sleep(0.1)

    async def _restart_router(self) -> bool:
        for _ in range(_ROUTER_ATTEMPTS):
            await self._threaded(self._router.stop)
            self._router = self._new_router(port=self._router.port, api_key=self._router.api_key)
            try:
                await self._threaded(self._router.start, self.start_timeout)
                return True
            except EngineError as error:  # its port may be taken for a moment
                log.warning("%s", error)
                await asyncio.sleep(1.0)
        return False

    async def _threaded(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the engine pool failed", exc_info=task.exception())
