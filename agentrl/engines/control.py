"""The control plane of one engine: pause, weights, versions, health, by SGLang's HTTP routes.

These calls go to the engine itself, not through the router, which has no such routes. Every call has a
deadline; every failure is an :class:`~agentrl.errors.EngineError` that names the engine and the route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentrl.errors import EngineError

PAUSE_MODES = ("retract", "in_place", "abort")


Call = tuple[str, dict[str, Any]]
"""A route of SGLang's and what is sent to it."""


@dataclass(frozen=True)
class Bucket:
    """A run of tensors that travel as one flat buffer, in order, without gaps."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Torch dtype names, such as ``float32``."""
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


# What can be asked for :meth:`EngineControl.in_turn`.


def pausing(mode: str = "retract") -> Call:
    """Stop generating. New requests wait. ``mode`` says what becomes of those in flight: ``retract``: they go back to
    the queue and their KV cache is computed anew with the new weights; ``in_place``: they keep it and go on with it;
    ``abort``: they return what they have (docs/asynchronous.md)."""
    if mode not in PAUSE_MODES:
        raise ValueError(f"pause mode {mode!r}; expected one of {', '.join(PAUSE_MODES)}")
    return "/pause_generation", {"mode": mode}


def continuing() -> Call:
    """Generate again."""
    return "/continue_generation", {"torch_empty_cache": False}


RELEASE: Call = ("/release_memory_occupation", {})
"""Give all memory back: KV cache, weights, CUDA graphs. SGLang takes it only while nothing runs."""
RESUME: Call = ("/resume_memory_occupation", {})
"""Have it again; the weights in it are nobody's. SGLang's scheduler ends at one that was not released."""
BEGIN: Call = ("/begin_weight_update", {})
"""Open the session within which a broadcast may arrive."""
END: Call = ("/end_weight_update", {})
"""Close it."""


def receive(bucket: Bucket, *, version: int | None, flush: bool) -> Call:
    """Receive one bucket by broadcast from rank 0 of the process group ``group_name``, to be added, and load it.

    Args:
        version: set with this bucket, the last one.
        flush: drop the prefix cache afterwards, which no request finds any more (:mod:`agentrl.engines.server`); it
            fails while requests run, so not with ``in_place``.
    """
    return "/update_weights_from_distributed", {
        "names": bucket.names,
        "dtypes": bucket.dtypes,
        "shapes": bucket.shapes,
        "load_format": "flattened_bucket",
        "flush_cache": flush,
        "weight_version": None if version is None else str(version),
    }


def load_files(path: str, *, version: int, flush: bool) -> Call:
    """Load the safetensors files of a folder that the engine can read, whatever it loaded at its start."""
    return "/update_weights_from_disk", {
        "model_path": path,
        "load_format": "auto",
        "weight_version": str(version),
        "flush_cache": flush,
    }


class EngineControl:
    """Asynchronous calls to one engine. One instance serves one event loop.

    Args:
        url: the engine's own address.
        api_key: its key.
        timeout: seconds a call may take when it is not told otherwise.
    """

    def __init__(self, url: str, api_key: str, *, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self.closed = False  # its engine was given up
        self.released = False
        """It may have no memory: it can neither generate nor be asked for its weights."""
        self._gave_back = False  # it said so

    def __repr__(self) -> str:
        return f"EngineControl({self.url})"

    async def close(self) -> None:
        """Close the connections, for good. The engine itself goes on."""
        self.closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Generation.

    async def in_turn(self, calls: Sequence[Call], *, timeout: float | None = None) -> None:
        """Ask for these one after the other, until one is refused: one request (:mod:`agentrl.engines.server`)."""
        await self._post("/in_turn", calls, timeout=timeout)

    async def pause(self, mode: str = "retract", *, timeout: float | None = None) -> None:
        """See :func:`pausing`."""
        await self._post(*pausing(mode), timeout=timeout)

    async def continue_(self, *, timeout: float | None = None) -> None:
        """Generate again."""
        await self._post(*continuing(), timeout=timeout)

    async def abort(self, rid: str | None = None, *, timeout: float | None = None) -> None:
        """End one request by id, or all. They return what they have with finish reason ``abort``.

        SGLang matches ids by prefix, so ids of one run must have equal length.
        """
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._post("/abort_request", body, timeout=timeout)

    # Weights.

    async def init_group(
        self,
        *,
        host: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float | None = None,
    ) -> None:
        """Join a process group with the sender (rank 0). Returns when all members have joined."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, timeout=timeout)

    async def destroy_group(self, group_name: str, *, timeout: float | None = None) -> None:
        """Leave a process group; none of that name is no error."""
        await self._call(
            "POST", "/destroy_weights_update_group", {"group_name": group_name}, timeout, accept=(200, 400)
        )

    async def end_weight_update(self, *, timeout: float | None = None, missing_ok: bool = False) -> None:
        """Close an update's session. With ``missing_ok`` it is no error that none was open."""
        await self._call("POST", *END, timeout, accept=(200, 400) if missing_ok else (200,))

    async def version(self, *, timeout: float | None = None) -> str:
        """The version of the weights, as requests report it; ``default`` before the first sync."""
        _, answer = await self._call("GET", "/model_info", None, timeout)
        return str(answer["weight_version"])

    async def checksums(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        """Checksum of every parameter the engine holds: one dict (name to hex) per tensor-parallel rank."""
        answer = await self._post("/weights_checker", {"action": "checksum"}, timeout=timeout)
        return [dict(rank["checksums"]) for rank in answer["ranks"]]

    async def overwrite_weights(self, *, timeout: float | None = None) -> None:
        """Fill every parameter with random numbers, to see afterwards which ones new weights replace."""
        await self._post("/weights_checker", {"action": "reset_tensors"}, timeout=timeout)

    # Memory.

    async def release(self, *, timeout: float) -> None:
        """Stop generating and give the memory back. Requests in flight wait in the queue, and new ones with them.
        Nothing where it did: SGLang stashes the model's buffers, and would stash them anew when nothing is in them."""
        if self._gave_back:
            return
        self.released = True  # also where the answer is lost
        await self.in_turn([pausing(), RELEASE], timeout=timeout)
        self._gave_back = True

    async def resume(self, *, timeout: float) -> None:
        """Have the memory again, if it was released. The engine still stands: it needs weights first."""
        if self.released:
            await self._post(*RESUME, timeout=timeout)
            self.released = self._gave_back = False

    # Health.

    async def can_generate(self, *, timeout: float = 20.0) -> bool:
        """Whether the whole engine answers: one token is generated if nothing else is. False while paused."""
        try:
            await self._call("GET", "/health_generate", None, timeout)
        except EngineError:
            return False
        return True

    async def _post(self, path: str, body: Any, *, timeout: float | None) -> Any:
        return (await self._call("POST", path, body, timeout))[1]

    async def _call(
        self,
        method: str,
        path: str,
        body: Any,
        timeout: float | None,
        *,
        accept: Sequence[int] = (200,),
    ) -> tuple[int, Any]:
        if self.closed:
            raise EngineError(f"engine {self.url}{path}: it was given up")
        if self._session is None:
            # uvicorn drops connections that idle for 5 s; letting go first avoids racing it.
            connector = aiohttp.TCPConnector(keepalive_timeout=4.0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        limit = self._timeout if timeout is None else timeout
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=limit)
            ) as answer:
                if answer.status not in accept:
                    refused = answer.headers.get("x-refused", path)
                    text = (await answer.text())[:500]
                    raise EngineError(f"engine {self.url}{refused}: HTTP {answer.status}: {text}")
                is_json = answer.content_type == "application/json"
                return answer.status, await answer.json() if is_json else None
        except TimeoutError:
            raise EngineError(f"engine {self.url}{path}: no answer within {limit:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"engine {self.url}{path}: {type(error).__name__}: {error}") from error
