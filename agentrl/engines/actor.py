"""Engines as the pool holds them: in this process, or each in a Ray actor that owns the server process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from agentrl.engines.control import EngineControl
from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.errors import EngineError
from agentrl.processes.network import is_loopback, node_address

_SEED_LIMIT = 2**31
STARTING, PENDING, SERVING, DEAD = "starting", "pending", "serving", "dead"


class EngineActor:
    """Owns one :class:`EngineProcess`. An ordinary class; :class:`RayEngine` makes a Ray actor of it.

    The server ends with this process, whatever ends it.

    Args:
        host: address the engine listens on. Of one that is not loopback, that of the machine it is on.
        The rest as for :class:`EngineProcess`.
    """

    def __init__(self, spec: EngineSpec, *, name: str, log_dir: str | None, host: str, api_key: str) -> None:
        own = host if is_loopback(host) else node_address()
        self._engine = EngineProcess(spec, name=name, log_dir=log_dir, host=own, api_key=api_key)

    def start(self, timeout: float) -> str:
        """Start the server; its address. Raises EngineError."""
        self._engine.start(timeout)
        return self._engine.url

    def wait(self, timeout: float) -> str | None:
        """Wait for the server to end; the end of its log when it has, ``None`` after ``timeout`` seconds."""
        return self._engine.log_tail() if self._engine.wait(timeout) else None

    def pids(self) -> list[int]:
        """Process ids of the server and its children."""
        return [proc.pid for proc in self._engine.tree()]

    def stop(self, grace: float) -> None:
        """End the server and all its children; it has so many seconds to go by itself."""
        self._engine.stop(grace)


class LocalEngine:
    """An :class:`EngineActor` in this process; its calls run in threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._actor = EngineActor(*args, **kwargs)
        # One waits for the server's end while the other starts and stops it.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="agentrl-engine")

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor. Raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, getattr(self._actor, method), *args)

    async def end(self, grace: float = 2.0) -> None:
        """End the engine, in whatever state it is: a start under way fails. It has so many seconds to go by itself."""
        await asyncio.to_thread(self._actor.stop, grace)
        self._threads.shutdown(wait=False)


class RayEngine:
    """An :class:`EngineActor` as a Ray actor.

    Args:
        ray_options: of the actor (placement, resources).
    """

    def __init__(self, ray_options: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        import ray

        # One thread waits for the server's end while others start and stop it.
        actor = ray.remote(EngineActor).options(max_concurrency=4, max_restarts=0, **ray_options)
        self._handle = actor.remote(*args, **kwargs)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor. Raises EngineError: what the method raised, or the actor is gone."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return await getattr(self._handle, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise error.cause from None
            raise EngineError(f"engine actor: {error}") from error
        except RayError as error:
            raise EngineError(f"the actor of an engine is gone: {error}") from error

    async def end(self, grace: float = 2.0) -> None:
        """End server and actor. The server has so many seconds to go by itself, and dies with the actor even if it
        cannot be asked."""
        import ray

        try:
            async with asyncio.timeout(20.0):
                await self.call("stop", grace)
        except (EngineError, TimeoutError):
            pass
        ray.kill(self._handle, no_restart=True)  # type: ignore[arg-type]  # Ray says handle or class


@dataclass
class PooledEngine:
    """One place in the pool and the engine that fills it now."""

    index: int
    incarnation: int = 0
    state: str = STARTING
    engine: LocalEngine | RayEngine | None = None
    control: EngineControl | None = None
    watch: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    """What is left of the engine that was here before goes."""
    served_at: float | None = None
    """When it began to take requests, monotonic."""
    failed: int = 0
    """Engines in a row that never lasted here."""
    given_up: bool = False

    @property
    def name(self) -> str:
        """Stem of the log file; a replacement has a log of its own."""
        return f"engine-{self.index}" + (f"-restart-{self.incarnation}" if self.incarnation else "")

    def own(self, spec: EngineSpec, places: int, *, placed: bool = True) -> EngineSpec:
        """What the engine here serves, on what.

        With one seed, engines would sample the same answers to the same prompt. Where nobody has ``placed`` it (Ray
        shows an actor its own GPUs only), it takes the GPUs after those of the places before it.
        """
        if not placed and spec.device == "cuda":
            spec = replace(spec, extra={"base-gpu-id": self.index * spec.tp, **spec.extra})
        if spec.seed is None:
            return spec
        return replace(spec, seed=(spec.seed + self.index + places * self.incarnation) % _SEED_LIMIT)
