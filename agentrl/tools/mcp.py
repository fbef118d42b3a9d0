"""``mcp_tools``: the tools of any MCP server, started by a command or reached by HTTP."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import re
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, InfraError
from agentrl.redaction import redact
from agentrl.tools.arguments import shorten
from agentrl.tools.base import EpisodeEnv, Tool, ToolError, ToolErrorType, ToolResult
from agentrl.tools.mcp_session import Server, Session, list_once
from agentrl.tools.schema import tidy
from agentrl.versions import install_command

MAX_TOOLS = 200
"""Tools taken of one server."""


def mcp_tools(
    command: Sequence[str] | None = None,
    *,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    start_timeout: float = 30.0,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    prefix: str = "",
    shared: bool = False,
    max_output: int = 50_000,
) -> list[Tool]:
    """The tools of an MCP server, as tools of an environment.

    The server is asked for its tools once a process. Each episode then has a session of its own, opened by its
    first call and ended with it; a server started by ``command`` is a process of that session. With ``shared``
    one session serves all episodes at once: for servers that keep no state.

    What the server answers to a wrong call goes to the model. A server that cannot be reached or dies is an
    infrastructure error, never the model's. A server is somebody's program: started by ``command`` it runs with
    the rights of this process, though without its environment (``env`` is added to ``PATH``, ``HOME``,
    ``USER`` and the like).

    Args:
        command: Program and arguments of a server that speaks over its standard input and output.
        url: Of a server that speaks streamable HTTP, such as ``http://127.0.0.1:8000/mcp``.
        env: Environment variables for ``command``.
        cwd: Working directory for ``command``.
        headers: Sent with each request to ``url``, for a key say.
        timeout: Seconds a call may take.
        start_timeout: Seconds until the server must be ready.
        include: Names of the tools to take; default: all.
        exclude: Names of tools to leave out.
        prefix: Put before each name, where two servers have tools of one name.
        shared: Whether all episodes use one session.
        max_output: Characters of a result that are kept.

    Raises:
        ConfigError: The settings do not fit, the command does not exist, a name is not among the server's tools,
            or the package ``mcp`` is not installed.
        InfraError: The server does not start or does not answer.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(f"tools of MCP servers need the package mcp: {install_command('tools')}")
    if (command is None) == (url is None):
        raise ConfigError("mcp_tools takes the command that starts a server, or the url of one that runs")
    if isinstance(command, str) or (command is not None and not command):
        raise ConfigError(f"command is a list, such as ['python', 'server.py'], got {command!r}")
    if url is not None and (env or cwd):
        raise ConfigError("env and cwd are for a server started by command; for a url there are headers")
    if command is not None and headers:
        raise ConfigError("headers are for a url; for a server started by command there is env")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not a URL; expected http://host:port/mcp")
    server = Server(
        command=tuple(map(str, command or ())),
        url=url or "",
        env=tuple(sorted((env or {}).items())),
        cwd=None if cwd is None else str(cwd),
        headers=tuple(sorted((headers or {}).items())),
        start_timeout=start_timeout,
        timeout=timeout,
    )
    source = _source(server)
    taken = _chosen(source.tools(), include, exclude, server.name)
    tools = [McpTool(source, definition, prefix=prefix, shared=shared, max_output=max_output) for definition in taken]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigError(f"{server.name}: two tools would be named {max(names, key=names.count)!r}; exclude one")
    return list(tools)


class McpTool(Tool, described=False):
    """A tool of an MCP server. Made by :func:`mcp_tools`.

    Args:
        source: The server.
        definition: The tool as the server lists it, a ``mcp_types.Tool``.
        prefix: Put before its name.
        shared: Whether all episodes use one session.
        max_output: Characters of a result that are kept.
    """

    def __init__(self, source: Source, definition: Any, *, prefix: str, shared: bool, max_output: int) -> None:
        self.source = source
        self.original = definition.name
        # Models and chat templates expect names of letters, digits, - and _.
        self.name = re.sub(r"[^\w-]", "_", prefix + definition.name, flags=re.ASCII)[:64]
        self.description = (definition.description or definition.title or definition.name).strip()
        schema = tidy(definition.input_schema, {})
        self.parameters = {**schema, "type": "object", "properties": schema.get("properties") or {}}
        self.shared = shared
        self.max_output = max_output
        # A first call also starts the server; both have deadlines of their own, which say whose fault it was.
        self.timeout = source.server.start_timeout + source.server.timeout + 5.0
        self.session: Session | None = source.shared_session if shared else None

    def for_episode(self, env: EpisodeEnv) -> McpTool:
        if self.shared:
            return self
        tool = copy.copy(self)
        tool.session = self.source.episode_session(env, self.name)
        return tool

    @property
    def runs_in_parallel(self) -> bool:
        return self.shared

    @property
    def owner(self) -> object:
        return self.session or self

    async def __call__(self, **arguments: Any) -> ToolResult:
        from mcp.shared.exceptions import MCPError

        if self.session is None:  # called outside of an episode
            self.session = Session(self.source.server)
        try:
            answer = await self.session.call(self.original, arguments)
        except TimeoutError:
            seconds = self.source.server.timeout
            raise ToolError(f"{self.name} took longer than {seconds:g} s", ToolErrorType.TIMEOUT) from None
        except MCPError as error:
            raise ToolError(f"{self.name}: {redact(error.message)}") from error
        text = shown(answer)
        if answer.is_error:
            raise ToolError(f"{self.name}: {redact(text) or 'it failed'}")
        cut = len(text) - self.max_output
        return ToolResult(text if cut <= 0 else f"{text[: self.max_output]}\n[{cut} more characters cut]")

    async def close(self) -> None:
        """Ends the episode's session; the other tools of the server share it."""
        if self.session is not None:
            await self.session.close()


def shown(answer: Any) -> str:
    """A ``mcp_types.CallToolResult`` as text. What is no text is named with its kind and size."""
    parts = []
    for block in answer.content:
        resource = getattr(block, "resource", None)
        if block.type == "text":
            parts.append(block.text)
        elif resource is not None and getattr(resource, "text", None) is not None:
            parts.append(resource.text)
        elif block.type == "resource_link":
            parts.append(f"[{shorten(f'{block.name}: {block.uri}', 300)}]")
        else:
            data = getattr(block, "data", None) or getattr(resource, "blob", None) or ""
            kind = getattr(block, "mime_type", None) or getattr(resource, "mime_type", None) or block.type
            parts.append(f"[{shorten(kind, 60)}, {len(data) * 3 // 4 - data.count('=', -2)} bytes, not shown]")
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(parts)


class Source:
    """A server, its list of tools, and the sessions of the episodes that run."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.shared_session = Session(server)
        self._lock = threading.Lock()
        self._tools: list[Any] | None = None
        self._episodes: weakref.WeakKeyDictionary[Any, tuple[Session, set[str]]] = weakref.WeakKeyDictionary()

    def tools(self) -> list[Any]:
        """The server's tools, asked for once."""
        with self._lock:
            if self._tools is None:
                self._tools = list_once(self.server)
            return self._tools

    def episode_session(self, env: EpisodeEnv, name: str) -> Session:
        """The session of the episode that ``env`` plays: one for all tools of the server, a new one when a tool
        comes again."""
        with self._lock:
            session, names = self._episodes.get(env, (None, set()))
            if session is None or session.closed or name in names:
                session, names = Session(self.server), set()
                self._episodes[env] = (session, names)
            names.add(name)
            return session


def _chosen(tools: list[Any], include: Iterable[str] | None, exclude: Iterable[str], server: str) -> list[Any]:
    names = [tool.name for tool in tools]
    wanted = None if include is None else list(include)
    for name in (*(wanted or ()), *exclude):
        if name not in names:
            raise ConfigError(f"{server} has no tool {name!r}; it has {shorten(', '.join(names), 500) or 'none'}")
    left_out = set(exclude)
    taken = [tool for tool in tools if (wanted is None or tool.name in wanted) and tool.name not in left_out]
    if len(taken) > MAX_TOOLS:
        raise ConfigError(f"{server} has {len(taken)} tools; choose at most {MAX_TOOLS} by include=[...]")
    if not taken:
        raise InfraError(f"{server} has no tools")
    return taken


@functools.cache
def _source(server: Server) -> Source:
    """One a process for the same settings, however many environments ask."""
    return Source(server)
