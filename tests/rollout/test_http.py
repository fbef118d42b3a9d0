import asyncio
from contextlib import asynccontextmanager

import pytest

from agentrl.errors import ConfigError
from agentrl.rollout.policies.http import HttpPost


@asynccontextmanager
async def serving(*answers, step=None, keep=True):
    """A server that answers each request with the next of ``answers`` (the last one for ever), ``step``
    bytes at a time; yields its URL and what it received."""
    received, connections = [], []

    async def handle(reader, writer):
        connections.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                received.append((head, await reader.readexactly(length)))
                raw = answers[min(len(received), len(answers)) - 1]
                for at in range(0, len(raw), step or len(raw) or 1):
                    writer.write(raw[at : at + (step or len(raw))])
                    await writer.drain()
                    await asyncio.sleep(0)
                if not keep or not raw:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate", received, connections
    finally:
        server.close()


def plain(body, status=200, extra=""):
    return f"HTTP/1.1 {status} Any\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
TRAILER = CHUNKED[:-2] + b"X-End: 1\r\n\r\n"


def posted(run, *answers, times=1, **options):
    async def go():
        async with serving(*answers, **options) as (url, received, connections):
            http = HttpPost(url, {"Authorization": "Bearer k"})
            try:
                got = [await http.post(b'{"a": 1}', "X-Key", "t-0", timeout=5) for _ in range(times)]
            finally:
                await http.close()
            return got, received, connections

    return run(go(), 10)


@pytest.mark.parametrize("step", [None, 1, 7])
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (plain(b"hello world"), (200, b"hello world")),
        (plain(b"no", 503), (503, b"no")),
        (plain(b""), (200, b"")),
        (CHUNKED, (200, b"hello world")),
        (TRAILER, (200, b"hello world")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + plain(b"after"), (200, b"after")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
    ],
)
def test_answers_of_all_forms(run, raw, expected, step):
    got, received, connections = posted(run, raw, times=3, step=step)
    assert got == [expected] * 3
    assert len(connections) == 1  # kept alive
    head, body = received[0]
    assert head.startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer k\r\n" in head and b"\r\nX-Key: t-0\r\n" in head
    assert body == b'{"a": 1}'


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"HTTP/1.0 200 OK\r\nContent-Length: 13\r\n\r\nuntil the end"]
)
def test_an_answer_that_ends_with_the_connection(run, raw):
    got, _, connections = posted(run, raw, times=2, keep=False)
    assert got == [(200, b"until the end")] * 2 and len(connections) == 2


def test_connection_close_is_honoured(run):
    got, _, connections = posted(run, plain(b"x", extra="Connection: close\r\n"), times=2)
    assert got == [(200, b"x")] * 2 and len(connections) == 2


def test_a_connection_the_server_let_go_of_is_replaced(run):
    async def go():
        async with serving(plain(b"x")) as (url, _, connections):
            http = HttpPost(url, {})
            await http.post(b"", "X-Key", "a", timeout=5)
            connections[0].close()
            await asyncio.sleep(0.05)
            assert (await http.post(b"", "X-Key", "a", timeout=5))[1] == b"x"
            http._idle_seconds = 0.0
            await asyncio.sleep(0.01)
            assert (await http.post(b"", "X-Key", "a", timeout=5))[1] == b"x"
            assert len(connections) == 3
            await http.close()

    run(go())


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf", "inside an answer"),
        (CHUNKED[:-8], "inside an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-", "inside an answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 2xx OK\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70000, "does not end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not an HTTP answer"),
    ],
)
def test_broken_answers_are_connection_errors(run, raw, text):
    with pytest.raises(ConnectionError, match=text):
        posted(run, raw, keep=False)


def test_header_values_cannot_inject(run):
    async def go():
        async with serving(plain(b"x")) as (url, received, _):
            http = HttpPost(url, {})
            await http.post(b"", "X-Key", "a\r\nX-Evil: 1 é", timeout=5)
            await http.close()
            return received[0][0]

    head = run(go())
    assert b"X-Key: a__X-Evil:_1__\r\n" in head and b"\r\nX-Evil" not in head
    with pytest.raises(ConfigError, match="one line"):
        HttpPost("http://127.0.0.1:1/x", {"Authorization": "Bearer a\r\nX: y"})


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x/y", "http:///path"])
def test_addresses(url):
    with pytest.raises(ConfigError, match="http://"):
        HttpPost(url, {})


@pytest.mark.parametrize("given_up", [True, False])
def test_giving_up_drops_the_connection(run, given_up):
    async def go():
        gone = asyncio.Event()

        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.read() == b""  # the client went away
            gone.set()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        http = HttpPost(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x", {})
        with pytest.raises(TimeoutError):
            if given_up:
                await http.post(b"", "X-Key", "a", timeout=0.5)
            async with asyncio.timeout(0.5):
                await http.post(b"", "X-Key", "a", timeout=5)
        await asyncio.wait_for(gone.wait(), 5)
        assert not http._idle and not http._open
        server.close()

    run(go())


def test_a_request_that_the_server_had_is_not_sent_again_as_it_is(run):
    async def go():
        async with serving(plain(b"1"), b"") as (url, received, _):  # the second time it hangs up without a word
            http = HttpPost(url, {})
            await http.post(b"{}", "X-Key", "t-0", timeout=5)
            connection = http._idle[-1]
            written = connection._transport.write
            connection._transport = _Slow(connection._transport, written)
            with pytest.raises(ConnectionError):
                await http.post(b"{}", "X-Key", "t-0", timeout=5)
            await http.close()
            return len(received)

    assert run(go(), 10) == 2


class _Slow:
    """A transport whose bytes leave a second after they were written, as if the server had taken so long."""

    def __init__(self, transport, write):
        self._transport, self._write = transport, write

    def write(self, data):
        asyncio.get_running_loop().call_later(1.0, self._write, data)

    def __getattr__(self, name):
        return getattr(self._transport, name)
