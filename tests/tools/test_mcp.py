"""Tools of real MCP servers: one started by a command, one reached by HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

import agentrl
from agentrl.concurrency.threads import run_coroutine
from agentrl.errors import ConfigError, InfraError
from agentrl.tools import ToolResult, close_tools, mcp_tools, run_calls
from agentrl.tools.mcp import shown
from agentrl.tools.mcp_session import MAX_PAGES, Server, Session, _listed
from agentrl.types import ToolCall

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]


class Episode:
    """Stands for an environment that plays an episode with these tools."""

    def __init__(self, tools) -> None:
        self.tools = {tool.name: tool for tool in (tool.for_episode(self) for tool in tools)}

    def __call__(self, name: str, /, **arguments) -> ToolResult:
        (result,) = asyncio.run(run_calls([ToolCall(name, arguments)], self.tools, timeout=30, max_calls=1))
        return result

    def close(self) -> None:
        asyncio.run(close_tools(self.tools.values()))


def is_alive(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def tools():
    return mcp_tools(COMMAND, timeout=10)


@pytest.fixture
def episode(tools) -> Iterator[Episode]:
    playing = Episode(tools)
    yield playing
    playing.close()


# -- by a command -----------------------------------------------------------------------------------


def test_the_servers_tools_are_tools(tools):
    add = tools[0].schema()["function"]
    assert (add["name"], add["description"]) == ("add", "Adds two numbers.")
    assert add["parameters"]["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}}
    assert [tool.name for tool in tools][:3] == ["add", "keep_note", "process"]
    assert mcp_tools(COMMAND, timeout=10)[0].source is tools[0].source  # asked once a process


def test_calls_results_and_errors(episode, monkeypatch):
    assert episode("add", a="40").observation == "42"
    assert [episode("keep_note", text=text).observation for text in "ab"] == ["a", "a,b"]
    assert episode("picture").observation == "[image/png, 100 bytes, not shown]"
    wrong = episode("add", a="x")
    assert (wrong.error.type, wrong.observation.count("is not of type 'integer'")) == ("invalid_arguments", 1)
    failed = episode("fail", how="value")
    assert failed.error.type == "execution"
    assert "/home" not in failed.observation and len(failed.observation) < 400
    cut = Episode(mcp_tools(COMMAND, timeout=10, include=["much"], max_output=10))
    assert cut("much", size=1000).observation == "x" * 10 + "\n[990 more characters cut]"
    assert len(episode("much", size=3_000_000).observation) < 60_000
    cut.close()


def test_each_episode_has_a_server_that_ends_with_it(tools, episode):
    other = Episode(tools)
    pids = [playing("process").observation for playing in (episode, other)]
    assert pids[0] != pids[1]
    assert all(map(is_alive, pids))
    other("keep_note", text="mine")
    grandchild = other("child").observation
    other.close()
    assert soon(lambda: not is_alive(pids[1]) and not is_alive(grandchild))
    assert is_alive(pids[0])
    with pytest.raises(InfraError, match="was closed"):
        other("process")


def test_the_environment_of_this_process_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THIS_PROCESS", "x")
    given = Episode(mcp_tools(COMMAND, env={"GIVEN": "y"}, include=["environment"]))
    assert given("environment", name="SECRET_OF_THIS_PROCESS").observation == "not set"
    assert given("environment", name="GIVEN").observation == "y"
    given.close()


def test_a_server_that_dies_is_an_infrastructure_error_and_the_next_episode_has_another(tools, episode):
    with pytest.raises(InfraError, match=r"is gone; it wrote: about to die: \[secret\] … \\x1b") as caught:
        episode("fail", how="die")
    assert str(caught.value).isprintable()
    again = Episode(tools)
    assert again("add", a=1).observation == "3"
    again.close()


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_given_up():
    slow = Episode(mcp_tools(COMMAND, timeout=0.5, start_timeout=20, include=["sleep"]))
    result = slow("sleep", seconds=20)
    assert (result.error.type, result.observation) == ("timeout", "Error (timeout): sleep took longer than 0.5 s")
    slow.close()


def test_all_episodes_may_share_one_session():
    shared = mcp_tools(COMMAND, timeout=10, shared=True, include=["process"])
    first, second = Episode(shared), Episode(shared)
    pid = first("process").observation
    first.close()
    assert second("process").observation == pid
    run_coroutine(shared[0].session.close())
    assert soon(lambda: not is_alive(pid))


class Sums(agentrl.ToolEnv):
    tasks = {"train": [("1 + 2?", "3")], "test": [("2 + 2?", "4")]}
    reward = "exact_match"

    def __init__(self) -> None:
        super().__init__()
        self.tools = mcp_tools(COMMAND, timeout=10, include=["add", "process"])


@pytest.mark.slow
def test_in_an_environment_sync_and_async():
    def turn(name: str, **arguments) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    env = Sums()
    env.reset(seed=0)
    assert env.step(turn("add", a=1))[0] == "3"
    first = env.step(turn("process"))[0]
    assert env.step("3")[1:3] == (1.0, True)
    assert soon(lambda: not is_alive(first))

    async def play() -> str:
        await env.areset(seed=0)
        observation, *_ = await env.astep(turn("process"))
        await env.aclose()
        return observation

    second = asyncio.run(play())
    assert second != first
    assert soon(lambda: not is_alive(second))


@pytest.mark.slow
def test_nothing_is_left_when_the_process_ends_or_is_killed():
    program = (
        "import asyncio, sys\nfrom agentrl.tools import mcp_tools, run_calls\nfrom agentrl.types import ToolCall\n"
        "tools = mcp_tools([sys.executable, *sys.argv[1:]], include=['process'])\n"
        "tools = {tool.name: tool.for_episode(sys) for tool in tools}\n"
        "calls = [ToolCall('process', {})]\n"
        "(result,) = asyncio.run(run_calls(calls, tools, timeout=30, max_calls=1))\n"
        "print(result.observation, flush=True)\n"
        "sys.stdin.read()\n"
    )
    for how in ("kill", "exit"):
        # One that goes on when its input is closed, and one that does not.
        arguments = [str(SERVER), *(["deaf"] if how == "kill" else [])]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pid = process.stdout.readline().strip()
        assert is_alive(pid)
        if how == "kill":
            os.kill(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait(20)
        process.stdout.close()
        assert soon(lambda pid=pid: not is_alive(pid)), how


@pytest.mark.slow
def test_servers_that_do_not_start_are_explained():
    with pytest.raises(ConfigError, match="'no-such-program' is not there"):
        mcp_tools(["no-such-program"])
    with pytest.raises(InfraError, match="it wrote: this server does not start"):
        mcp_tools([*COMMAND, "broken"])
    with pytest.raises(InfraError, match="was not ready within 1 s"):
        mcp_tools([*COMMAND, "slow"], start_timeout=1)


def test_a_server_has_so_many_tools_and_pages(monkeypatch):
    monkeypatch.setattr("agentrl.tools.mcp.MAX_TOOLS", 3)
    with pytest.raises(ConfigError, match=r"tools; choose at most 3 by include"):
        mcp_tools(COMMAND, timeout=10)

    class Endless:
        async def list_tools(self, cursor):
            return types.SimpleNamespace(tools=["tool"], next_cursor="more")

    assert len(asyncio.run(_listed(Endless()))) == MAX_PAGES


# -- by HTTP ----------------------------------------------------------------------------------------


class HttpServer:
    """The test's server on a free port of this machine, with a key."""

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("mcp_http_server", SERVER)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.app = module.server.streamable_http_app()
        self.listening = socket.socket()
        self.listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/mcp"
        self.server = uvicorn.Server(
            uvicorn.Config(self.guarded, interface="asgi3", log_level="error", timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],), daemon=True)
        self.thread.start()
        assert soon(lambda: self.server.started)

    async def guarded(self, scope, receive, send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and headers.get(b"authorization") != b"Bearer key-of-the-test":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no key"})
            return
        await self.app(scope, receive, send)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.listening.close()


KEY = {"Authorization": "Bearer key-of-the-test"}


def test_a_server_over_http():
    server = HttpServer()
    tools = mcp_tools(url=server.url, headers=KEY, timeout=5, prefix="far.", include=["add", "keep.note", "process"])
    assert [tool.name for tool in tools] == ["far_add", "far_keep_note", "far_process"]
    playing = Episode(tools)
    assert playing("far_add", a=1, b=1).observation == "2"
    assert playing("far_process").observation == str(os.getpid())
    with pytest.raises(InfraError) as caught:
        mcp_tools(url=server.url, headers={"Authorization": "Bearer wrong"}, start_timeout=5)
    assert "wrong" not in str(caught.value)
    server.stop()
    with pytest.raises(InfraError, match="127.0.0.1"):
        playing("far_add", a=1)
    playing.close()


def test_a_url_where_nothing_answers():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(InfraError, match="cannot be used"):
            mcp_tools(url=f"http://127.0.0.1:{unused.getsockname()[1]}/mcp", start_timeout=5)


# -- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the command that starts a server, or the url"),
        ({"command": COMMAND, "url": "http://x"}, "the command that starts a server, or the url"),
        ({"command": "python server.py"}, "command is a list"),
        ({"command": []}, "command is a list"),
        ({"command": COMMAND, "headers": KEY}, "headers are for a url"),
        ({"url": "http://x/", "env": {"A": "b"}}, "env and cwd are for"),
        ({"url": "localhost:80"}, "is not a URL"),
        ({"command": COMMAND, "timeout": 10, "include": ["nothing"]}, "has no tool 'nothing'; it has add,"),
        ({"command": COMMAND, "timeout": 10, "exclude": ["nothing"]}, "has no tool 'nothing'"),
    ],
)
def test_wrong_settings_are_explained(options, message):
    with pytest.raises(ConfigError, match=message):
        mcp_tools(**options)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"agentrl-toolkit\[tools\]"):
        mcp_tools(COMMAND)


def test_a_server_is_named_without_arguments_and_credentials():
    assert Server(command=("/opt/bin/tool", "--key", "x")).name == "MCP server tool"
    assert Server(url="http://host/mcp?key=x").name == "http://host/mcp"
    assert Server(url="https://me:word@host:8000/mcp/a@b?key=x").name == "https://host:8000/mcp/a@b"


def test_results_of_every_kind():
    import mcp_types

    resource = mcp_types.TextResourceContents(uri="file:///a.txt", text="text of it")
    blob = mcp_types.BlobResourceContents(uri="file:///a.bin", blob="AAAA", mime_type="application/x")
    content = [
        mcp_types.TextContent(text="first"),
        mcp_types.AudioContent(data="AAAA", mime_type="audio/wav"),
        mcp_types.EmbeddedResource(resource=resource),
        mcp_types.EmbeddedResource(resource=blob),
        mcp_types.ResourceLink(name="page", uri="https://example.org/"),
    ]
    assert shown(mcp_types.CallToolResult(content=content)).splitlines() == [
        "first",
        "[audio/wav, 3 bytes, not shown]",
        "text of it",
        "[application/x, 3 bytes, not shown]",
        "[page: https://example.org/]",
    ]
    assert shown(mcp_types.CallToolResult(content=[], structured_content={"a": "é"})) == '{"a": "é"}'


def test_a_session_that_is_dropped_ends_its_server():
    session = Session(Server(command=tuple(COMMAND)))
    pid = run_coroutine(session.call("process", {})).content[0].text
    del session
    assert soon(lambda: not is_alive(pid))
