"""Sessions with MCP servers, each opened when first used and ended with all it started.

The ``mcp`` package wants a connection to be opened and closed by one task. So each connection is a task on an
event loop of this module's own, and callers on any thread or loop hand it their calls.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import shutil
import signal
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.concurrency.threads import LoopThread, as_exception
from agentrl.errors import ConfigError, InfraError
from agentrl.processes.signals import printable
from agentrl.redaction import redact

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 8.0
"""In which a server ends: it is asked by closing its input, after 2 s terminated, after 2 s more killed."""
MAX_PAGES = 50
"""Pages of a server's list of tools."""

# Linux ends the server with the process that started it, however that one dies. Its id, which is that of its
# process group too, is the first line of its standard error.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
os.write(2, b"%d\\n" % os.getpid())
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""

_loop = LoopThread("agentrl-mcp")
_open: set[_Connection] = set()


@dataclass(frozen=True)
class Server:
    """Where an MCP server is: a command to start, or a URL.

    ``start_timeout`` and ``timeout`` are the seconds in which it must be ready and answer a call.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    start_timeout: float = 30.0
    timeout: float = 30.0

    @property
    def name(self) -> str:
        """The server as it is named in errors, without arguments and credentials."""
        if not self.url:
            return f"MCP server {os.path.basename(self.command[0])}"
        scheme, _, rest = self.url.partition("?")[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"

    @contextlib.asynccontextmanager
    async def connect(self, errors: _Tail) -> AsyncIterator[Any]:
        """A client of the ``mcp`` package, its handshake done."""
        from mcp.client import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with contextlib.AsyncExitStack() as stack:
            if self.url:
                http = await stack.enter_async_context(create_mcp_http_client(headers=dict(self.headers)))
                transport = streamable_http_client(self.url, http_client=http)
            else:
                path = {**os.environ, **dict(self.env)}.get("PATH")
                if shutil.which(self.command[0], path=path) is None:
                    raise ConfigError(f"the MCP server's command {self.command[0]!r} is not there; give its full path")
                arguments = ["-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self.command]
                parameters = StdioServerParameters(
                    command=sys.executable, args=arguments, env=dict(self.env), cwd=self.cwd
                )
                transport = stdio_client(parameters, errlog=stack.enter_context(errors.file()))
                stack.callback(errors.end_group)
            yield await stack.enter_async_context(Client(transport, read_timeout_seconds=self.timeout))


class Session:
    """A session with a server, opened when first used.

    Ended by :meth:`close`, when the object is dropped, or when the process ends.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._connection = _Connection(server)
        self._finalizer = weakref.finalize(self, _let_go, self._connection)
        self._finalizer.atexit = False  # the module closes what is open then

    @property
    def closed(self) -> bool:
        return self._connection.closing

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The server's answer to a call of one of its tools, a ``mcp_types.CallToolResult``.
        Raises InfraError: the server cannot be reached, or is gone.
        Raises TimeoutError: it did not answer in time.
        Raises mcp.shared.exceptions.MCPError: it refused the call."""
        seconds = self.server.timeout
        return await self._do(lambda client: client.call_tool(name, arguments, read_timeout_seconds=seconds))

    async def list_tools(self) -> list[Any]:
        """The server's tools, each a ``mcp_types.Tool``.
        Raises InfraError: the server cannot be reached, or does not answer in time."""
        try:
            return await self._do(_listed)
        except TimeoutError:
            raise InfraError(f"{self.server.name} did not list its tools within {self.server.timeout:g} s") from None

    async def close(self) -> None:
        """Ends the session, and the server if it was started for it. May be called twice."""
        with contextlib.suppress(InfraError):
            await asyncio.wrap_future(_loop.submit(self._connection.close()))

    async def _do(self, request: Callable[[Any], Awaitable[T]]) -> T:
        if self._connection.owner != os.getpid():  # this process was forked from the one that connected
            self._connection = _Connection(self.server)
        return await asyncio.wrap_future(_loop.submit(self._connection.do(request)))


def list_once(server: Server) -> list[Any]:
    """The tools of a server, by a session that is ended at once. Blocks.
    Raises ConfigError: its command does not exist.
    Raises InfraError: it cannot be reached, or does not answer in time."""

    async def ask() -> list[Any]:
        session = Session(server)
        try:
            return await session.list_tools()
        finally:
            await session.close()

    return _loop.submit(ask()).result()


async def _listed(client: Any) -> list[Any]:
    tools, cursor = [], None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


class _Connection:
    """The task that holds a connection. Everything but ``closing`` and ``owner`` is for the module's loop only."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.owner = os.getpid()
        self.closing = False
        self._errors = _Tail()
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._end: asyncio.Event | None = None

    async def do(self, request: Callable[[Any], Awaitable[T]]) -> T:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        client = await self._opened()
        try:
            return await request(client)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError(error.message) from error
            if error.code == CONNECTION_CLOSED:
                await self._reset()
                raise InfraError(f"{self.server.name} is gone{self._errors}") from error
            raise
        except (OSError, BaseExceptionGroup) as error:
            await self._reset()
            raise InfraError(f"{self.server.name} failed: {error}{self._errors}") from error

    async def _opened(self) -> Any:
        if self.closing:
            raise InfraError(f"the session with {self.server.name} was closed")
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._end = asyncio.Event()
            self._task = asyncio.create_task(self._hold(self._client, self._end))
            _open.add(self)
        return await asyncio.shield(self._client)

    async def _hold(self, client: asyncio.Future[Any], end: asyncio.Event) -> None:
        """Connects, tells ``client``, and stays until ``end``."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(self.server.start_timeout):
                        connected = await stack.enter_async_context(self.server.connect(self._errors))
                except TimeoutError:
                    seconds = self.server.start_timeout
                    raise InfraError(f"{self.server.name} was not ready within {seconds:g} s{self._errors}") from None
                client.set_result(connected)
                await end.wait()
        except BaseException as error:
            problem = error
            if not isinstance(error, (ConfigError, InfraError)):
                problem = InfraError(f"{self.server.name} cannot be used: {_cause(error)}{self._errors}")
            if not client.done():
                self._client = None  # the next call tries again
                client.set_exception(problem)
                client.exception()  # nobody may be waiting any more
            else:
                logger.warning("%s", problem)
            if not isinstance(error, Exception):
                raise
        finally:
            _open.discard(self)

    async def _reset(self) -> None:
        """Forgets a connection that broke; the next call makes another."""
        task, end = self._task, self._end
        self._client = self._task = self._end = None
        if task is not None and end is not None:
            end.set()
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)

    async def close(self) -> None:
        self.closing = True
        if self._client is not None and not self._client.done() and self._task is not None:
            self._task.cancel()  # still connecting
        await self._reset()


class _Tail:
    """The last that a server wrote to its standard error, for the text of errors."""

    _SIZE = 1000

    def __init__(self) -> None:
        self._kept = b""
        self._group = 0

    @contextlib.contextmanager
    def file(self) -> Iterator[Any]:
        """A file for the server to write to, read by the running loop."""
        loop = asyncio.get_running_loop()
        self._group = 0
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        loop.add_reader(reading, self._read, reading)
        try:
            with os.fdopen(writing, "w") as file:
                yield file
        finally:
            loop.remove_reader(reading)
            os.close(reading)

    def _read(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(descriptor, 65536)
            if not self._group:
                first, _, data = data.partition(b"\n")
                self._group = int(first)
            self._kept = (self._kept + data)[-self._SIZE :]

    def end_group(self) -> None:
        """Ends what the server started and left behind in its process group."""
        if self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)

    def __str__(self) -> str:
        text = " ".join(self._kept.decode("utf-8", "replace").split())
        return f"; it wrote: {redact(printable(text), end=True)}" if text else ""


def _cause(error: BaseException) -> str:
    """The innermost reason: what fails inside task groups comes wrapped in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {as_exception(error)}"


def _let_go(connection: _Connection) -> None:
    if connection.owner == os.getpid() and connection in _open:
        _loop.submit(connection.close())


@atexit.register
def _close_all() -> None:
    left = [connection for connection in list(_open) if connection.owner == os.getpid()]
    ends = [_loop.submit(connection.close()) for connection in left]
    concurrent.futures.wait(ends, CLOSE_SECONDS)
