"""A network between a client and a server that is slow, stalls, breaks in the middle of an answer, or is just gone."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import urllib.parse
from collections.abc import Iterable

STALL, VANISH, RESET = "stall", "vanish", "reset"
"""The answer comes ``stall_s`` late; nothing comes any more, and nobody closes the connection, as when a cable is
pulled; half of the answer comes, then the connection is reset."""


class SlowNetwork:
    """A TCP proxy in front of the server at ``target``. Use as an async context manager.

    Attributes:
        delay, jitter: seconds that each piece of data takes on its way, more or less.
        faults: what happens to the next answers, in order; None: nothing. Then ``always``, if anything.
        happened: those that did.
        url, key: as of the server, which asks for no key.
    """

    def __init__(
        self, target: str, *, delay: float = 0.0, jitter: float = 0.0, stall_s: float = 0.0,
        faults: Iterable[str | None] = (), always: str | None = None,
    ):  # fmt: skip
        self.delay, self.jitter, self.stall_s, self.always = delay, jitter, stall_s, always
        self.faults, self.happened = list(faults), list[str]()
        self.url, self.key = "", ""
        self._target = urllib.parse.urlsplit(target)
        self._random = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SlowNetwork:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        back = None
        try:
            there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, back, answers=False))
                both.create_task(self._carry(there, writer, answers=True))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in filter(None, (writer, back)):
                end.transport.abort()
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await reader.read(1 << 20):
            await asyncio.sleep(max(0.0, self.delay + self._random.uniform(-self.jitter, self.jitter)))
            fault = None
            if answers and data.startswith(b"HTTP/"):
                fault = self.faults.pop(0) if self.faults else self.always
            if fault is not None:
                self.happened.append(fault)
            if fault == VANISH:
                await asyncio.Event().wait()
            if fault == STALL:
                await asyncio.sleep(self.stall_s)
            if fault == RESET:
                writer.write(data[: len(data) // 2])
                await asyncio.sleep(0.02)  # it is with the client
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        raise ConnectionError("closed")
