"""Pages are read from public addresses only, and nothing a server does costs more than the bounds."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import httpcore
import pytest
from yardstick import within

from agentrl.errors import ConfigError
from agentrl.tools import FetchTool, ToolError, run_calls
from agentrl.tools.builtin import page_reader
from agentrl.tools.builtin.addresses import MAX_TRIED, AddressRefused, Guard, GuardedBackend, is_public, resolve
from agentrl.tools.builtin.fetch import MAX_TAGS, MAX_URL, Page, page_text
from agentrl.types import ToolCall

ARTICLE = "The whale is the largest animal that ever lived. " * 12
PAGE = (
    "<html><head><title>Whales &amp; co</title></head><body><nav>Home Login</nav>"
    f"<article><h1>Whales</h1><p>{ARTICLE}</p></article></body></html>"
)


class Site(BaseHTTPRequestHandler):
    """Answers by path; what it was asked is kept in ``server.asked``."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        name, _, argument = self.path.lstrip("/").partition("/")
        getattr(self, f"get_{name}", self.get_missing)(unquote(argument))

    def answer(self, body: bytes, kind: str | None = "text/plain", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for header, value in {"Content-Type": kind, **headers}.items():
            if value is not None:
                self.send_header(header.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def get_missing(self, _: str) -> None:
        self.answer(b"no", status=404)

    def get_page(self, _: str) -> None:
        self.answer(PAGE.encode(), "text/html; charset=utf-8")

    def get_attributes(self, count: str) -> None:
        tag = " ".join(f"a{number}=1" for number in range(int(count)))
        self.answer(f"<html><body><p {tag}>slow</p></body></html>".encode(), "text/html")

    def get_packed(self, _: str) -> None:
        self.answer(gzip.compress(PAGE.encode()), "text/html", Content_Encoding="gzip")

    def get_text(self, text: str) -> None:
        self.answer(text.encode())

    def get_latin(self, _: str) -> None:
        self.answer("né".encode("latin-1"), "text/plain; charset=iso-8859-1")

    def get_kind(self, kind: str) -> None:
        self.answer(b'{"a": 1}', kind or None)

    def get_null(self, _: str) -> None:
        self.answer(b"a\0b")

    def get_status(self, status: str) -> None:
        self.answer(b"x", status=int(status))

    def get_to(self, place: str) -> None:
        self.answer(b"", status=302, Location=place, Set_Cookie="session=1")

    def get_loop(self, count: str) -> None:
        self.answer(b"", status=301, Location=f"/loop/{int(count or 0) + 1}")

    def get_long(self, size: str) -> None:
        self.answer(b"x" * int(size))

    def get_bomb(self, _: str) -> None:
        pack = zlib.compressobj(9, wbits=31)
        packed = b"".join(pack.compress(b"0" * 10**6) for _ in range(100)) + pack.flush()
        self.answer(packed, Content_Encoding="gzip")

    def get_tail(self, _: str) -> None:
        """A short packed page, and then no end of something else."""
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self.wfile.write(gzip.compress(b"short"))
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            self.server.hung_up.set()  # type: ignore[attr-defined]

    def get_encoded(self, encoding: str) -> None:
        self.answer(b"\x1f\x8bnot packed at all", Content_Encoding=encoding)

    def get_drip(self, _: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            self.server.hung_up.set()  # type: ignore[attr-defined]

    def get_headers(self, _: str) -> None:
        self.send_response(200)
        for number in range(90):
            self.send_header(f"X-{number}", "y" * 5000)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.asked, server.hung_up = [], threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


class Fetcher:
    """The tool as a run calls it, allowed to reach the test's server."""

    def __init__(self, site: ThreadingHTTPServer) -> None:
        self.site, self.port = site, site.server_address[1]
        self.names: list[str] = []

    def tool(self, **options) -> FetchTool:
        def resolver(host: str) -> list[str]:
            self.names.append(host)
            return ["127.0.0.1"] if host.endswith("site.test") else resolve(host)

        defaults = {"allow_addresses": ["127.0.0.1/32"], "ports": [80, 443, self.port], "resolver": resolver}
        return FetchTool(**{**defaults, **options})

    def __call__(self, path: str, **options):
        url = path if re.match(r"\w+://", path) else f"http://site.test:{self.port}/{path}"
        calls = [ToolCall("fetch", {"url": url})]
        return asyncio.run(run_calls(calls, {"fetch": self.tool(**options)}, timeout=30, max_calls=1))[0]

    def refused(self, path: str, **options) -> str:
        result = self(path, **options)
        assert result.error is not None, result.observation
        assert result.error.type == "execution"
        assert len(result.observation) < 600
        return result.observation


@pytest.fixture
def fetch(site: ThreadingHTTPServer) -> Fetcher:
    site.asked.clear()  # type: ignore[attr-defined]
    return Fetcher(site)


# -- pages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["page", "packed"])
def test_a_page_is_read_as_its_article(fetch, path):
    result = fetch(path)
    lines = result.observation.splitlines()
    assert lines[0] == f"http://site.test:{fetch.port}/{path}"
    assert lines[1] == "Whales & co"
    assert ARTICLE.strip() in result.observation and "Login" not in result.observation
    assert result.metadata["status"] == 200


def test_other_text_passes_as_it_is(fetch):
    assert fetch("text/plain <b>words</b>").observation.endswith("\nplain <b>words</b>")
    assert fetch("latin").observation.endswith("\nné")
    assert fetch("kind/application/json").observation.endswith('{"a": 1}')
    assert fetch("kind/application/problem+json").error is None
    assert fetch("kind/").error is None
    assert fetch("text/").observation.endswith("[no text]")


def test_what_is_sent_says_nothing_about_the_machine(fetch, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert fetch("to/%2Ftext%2Fx").error is None
    (first, _), (second, headers) = fetch.site.asked
    assert (first, second) == ("/to/%2Ftext%2Fx", "/text/x")
    assert sorted(headers) == ["Accept", "Accept-Encoding", "Host", "User-Agent"]
    assert headers["Host"] == f"site.test:{fetch.port}"


def test_a_redirect_is_followed_and_named(fetch):
    result = fetch("to//text/there#part")
    assert result.observation == f"http://site.test:{fetch.port}/text/there\nthere"


# -- where it may go --------------------------------------------------------------------------------

PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "192.0.0.9",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "192.88.99.1",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2002:0a00:0001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "fe80::1",
    "fe80::1%eth0",
    "fe80::5efe:127.0.0.1",
    "2606:4700::5efe:10.0.0.1",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "1.1.1.1%x",
    "nonsense",
    "",
]
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2002:101:101::1"]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)
    with pytest.raises(AddressRefused):
        asyncio.run(Guard(resolver=lambda _: ["1.1.1.1", address]).addresses("host"))


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_that_are_public(address):
    assert is_public(address)


HOSTS = [
    "127.0.0.1",
    "localhost",
    "localhost.",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
]


@pytest.mark.parametrize("host", [*HOSTS, "127.1", "169.254.169.254", "0", "0.0.0.0", "10.0.0.1", "[fd00:ec2::254]"])
def test_this_machine_and_its_network_are_not_reached_by_any_name(fetch, host):
    text = fetch.refused(f"http://{host}:{fetch.port}/text/secret", allow_addresses=[], resolver=None)
    # Some forms the URL's own grammar refuses, and some resolvers do not know "localhost." at all.
    assert "only public web pages" in text or host in ("localhost.", "0177.0.0.1")
    assert fetch.site.asked == []


@pytest.mark.parametrize(
    "place",
    ["http://127.0.0.2:{}/text/x", "http://169.254.169.254/latest/meta-data", "http://[::1]:{}/", "//localhost.:{}/"],
)
def test_a_redirect_is_checked_like_the_first_address(fetch, place):
    target = place.format(fetch.port)
    text = fetch.refused(
        f"to/{target}",
        allow_addresses=["127.0.0.1/32"],
        resolver=lambda host: (
            ["127.0.0.1"] if host == "site.test" else ["127.0.0.2"] if "local" in host else resolve(host)
        ),
    )
    assert "only public web pages" in text
    assert len(fetch.site.asked) == 1


def test_a_name_that_changes_its_address_is_asked_once(fetch):
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2"]])
    asked = []

    def rebinding(host: str) -> list[str]:
        asked.append(host)
        return next(answers)

    assert fetch("text/once", resolver=rebinding).observation.endswith("once")
    assert asked == ["site.test"]
    assert "only public" in fetch.refused("text/again", resolver=rebinding)


def test_a_host_with_one_bad_address_among_good_ones_is_refused(fetch):
    for addresses in (["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"]):
        assert "only public" in fetch.refused("text/x", resolver=lambda _, a=addresses: a)


def test_the_connection_goes_to_the_address_and_tls_asks_for_the_name():
    dialed = []

    class Stream(httpcore.AsyncMockStream):
        async def start_tls(self, ssl_context, server_hostname=None, timeout=None):
            dialed.append(server_hostname)
            return self

    class Inner(httpcore.AsyncMockBackend):
        async def connect_tcp(self, host, port, **_):
            dialed.append((host, port))
            return Stream([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"])

    async def main() -> bytes:
        backend = GuardedBackend(Guard(resolver=lambda _: ["93.184.216.34"]), Inner([]))
        async with httpcore.AsyncConnectionPool(network_backend=backend) as pool:
            return (await pool.request("GET", "https://example.org/")).content

    assert asyncio.run(main()) == b"ok"
    assert dialed == [("93.184.216.34", 443), "example.org"]


def test_so_many_addresses_of_a_host_are_tried():
    dialed = []

    class Inner(httpcore.AsyncMockBackend):
        async def connect_tcp(self, host, port, **_):
            dialed.append(host)
            raise httpcore.ConnectError("no")

    addresses = [f"93.184.216.{n}" for n in range(10)]
    with pytest.raises(httpcore.ConnectError):
        asyncio.run(GuardedBackend(Guard(resolver=lambda _: addresses), Inner([])).connect_tcp("host", 80))
    assert dialed == addresses[:MAX_TRIED]


def test_sockets_of_the_machine_are_not_reached():
    with pytest.raises(AddressRefused):
        asyncio.run(GuardedBackend(Guard()).connect_unix_socket("/run/docker.sock"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "must begin with https:// or http://"),
        ("ftp://example.org/", "must begin with"),
        ("gopher://127.0.0.1:6379/_INFO", "must begin with"),
        ("javascript://x", "must begin with"),
        ("http://user:password@example.org/", "user name or password"),
        ("http://example.org:22/", "port 22 is not allowed"),
        ("http://example.org:99999/", "port 99999 is not allowed"),
        ("http://example.org:0/", "port 0 is not allowed"),
        ("http:///path", "names no host"),
        ("http://exa\nmple.org/", "is not a URL"),
        ("http://exa mple.org/", ""),
        ("http://[::1", "is not a URL"),
        ("http://\ud800/", "lone surrogate"),
        ("http://" + "a" * MAX_URL, f"at most {MAX_URL} characters"),
        ("http://no-such-host.invalid/", "its name has no address"),
        ("http://-.test/", ""),
    ],
)
def test_what_is_not_fetched(fetch, url, message):
    result = fetch(url, resolver=None) if "invalid" not in url else fetch(url, resolver=_unknown)
    assert result.error is not None
    assert message in result.observation
    assert "password" not in result.observation or "user name" in result.observation


def _unknown(host: str) -> list[str]:
    raise OSError(-2, "Name or service not known")


def test_a_url_without_a_scheme_is_explained(fetch):
    with pytest.raises(ToolError, match="must begin with"):
        fetch.tool().allowed_url("example.org/page")


def test_domains(fetch):
    text = f"http://{{}}:{fetch.port}/text/x"
    allowed = {"allowed_domains": ["Site.Test."]}
    assert fetch(text.format("site.test"), **allowed).error is None
    assert fetch(text.format("sub.SITE.test."), **{**allowed, "resolver": lambda _: ["127.0.0.1"]}).error is None
    assert "is not allowed; allowed are site.test" in fetch.refused(text.format("badsite.test"), **allowed)
    assert "is blocked" in fetch.refused(text.format("a.site.test"), blocked_domains=["site.test"])
    assert "is blocked" in fetch.refused(text.format("bücher.site.test"), blocked_domains=["bücher.site.test"])
    assert "is not allowed" in fetch.refused(f"to/http://other.test:{fetch.port}/", **allowed)


# -- limits -----------------------------------------------------------------------------------------


def test_redirects_have_an_end(fetch):
    assert "redirects more than 5 times" in fetch.refused("loop")
    assert len(fetch.site.asked) == 6
    assert "redirects more than 0 times" in fetch.refused("to//text/x", max_redirects=0)


def test_a_slow_page_is_given_up(fetch):
    result = fetch("drip", seconds=0.4)
    assert result.error.type == "timeout"
    assert "took longer than 0.4 s" in result.observation
    assert fetch.site.hung_up.wait(5)


def test_a_slow_resolver_is_given_up(fetch):
    async def slow(host: str) -> list[str]:
        await asyncio.sleep(10)
        return []

    assert fetch("text/x", seconds=0.2, resolver=slow).error.type == "timeout"


def test_a_long_page_is_cut(fetch):
    result = fetch("long/5000", max_bytes=1000)
    assert result.observation.endswith("x" * 1000 + "\n[only the first 1000 bytes of the page were read]")
    result = fetch("long/5000", max_chars=100)
    assert result.observation.endswith("x" * 100 + "\n[4900 more characters cut]")


def test_a_bomb_is_unpacked_to_the_limit_only(fetch):
    result = fetch("bomb", max_bytes=50_000)
    assert result.metadata["bytes"] == 50_000
    assert "only the first 50000 bytes" in result.observation


def test_what_follows_a_packed_page_is_not_read(fetch, site):
    site.hung_up.clear()
    assert fetch("tail", seconds=5.0).observation.endswith("\nshort")
    assert site.hung_up.wait(10)


def test_packing_that_was_not_asked_for_is_refused(fetch):
    assert "packed as br" in fetch.refused("encoded/br")
    assert "cannot be unpacked" in fetch.refused("encoded/gzip")


def test_headers_without_end_are_refused(fetch):
    assert "cannot be read (remote protocol error)" in fetch.refused("headers")


@pytest.mark.parametrize("kind", ["image/png", "application/pdf", "application/octet-stream", "video/mp4"])
def test_what_is_no_text_is_refused(fetch, kind):
    assert f"is {kind}, which cannot be read as text" in fetch.refused(f"kind/{kind}")


def test_other_failures_are_explained(fetch):
    assert "is not text" in fetch.refused("null")
    assert "answered HTTP 404" in fetch.refused("missing")
    assert "answered HTTP 503" in fetch.refused("status/503")
    assert "no connection" in fetch.refused("http://site.test:80/", allow_addresses=["127.0.0.1/32"])
    assert "redirects to something that is not a URL" in fetch.refused("to/http://[::1")


def test_a_page_made_to_be_slow_is_read_quickly():
    body = b"<html><body>" + b"<p>a" * (4 * MAX_TAGS) + b"</body></html>"
    text = within(150, lambda: page_text(Page("http://x/", 200, "text/html", body, False)))
    assert text.count("a") >= 4 * MAX_TAGS


def test_a_page_made_to_be_slow_ends_while_others_are_read(fetch):
    """The attributes of one tag: a minute of the parser, with a lock that all other pages wait for."""
    url = f"http://site.test:{fetch.port}/"

    async def all_of_them() -> list:
        slow = [ToolCall("slow", {"url": f"{url}attributes/40000"})]
        quick = [ToolCall("quick", {"url": f"{url}page"})] * 6
        tools = {"slow": fetch.tool(seconds=2.5), "quick": fetch.tool()}
        return await asyncio.gather(*(run_calls(calls, tools, timeout=60, max_calls=9) for calls in (slow, quick)))

    (slow,), quick = asyncio.run(all_of_them())
    assert slow.error.type in ("limit", "timeout") and "took" in slow.observation, slow
    assert [result.error for result in quick] == [None] * 6
    assert "largest animal" in fetch("page").observation


def test_a_reader_that_was_killed_is_replaced(fetch):
    assert "largest animal" in fetch("page").observation
    process = page_reader._reader()[1]
    process.kill()
    process.wait(10)
    assert "largest animal" in fetch("page").observation
    assert page_reader._reader()[1] is not process


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_reader_has_no_key_and_ends_with_its_owner():
    program = """
import os
os.environ["OPENAI_API_KEY"] = "secret"
from agentrl.tools.builtin import page_reader
print(page_reader.read_page("http://x/", "text/html", b"<html><body><p>Words.</p></body></html>", 60.0))
process = page_reader._reader()[1]
print("secret" in open(f"/proc/{process.pid}/environ").read(), process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    text, secret, pid = done.stdout.split()
    assert (text, secret) == ("Words.", "False"), done.stderr
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("charset", ["punycode", "idna", "unicode_escape", "hex", "zip", "nonsense", "utf_7"])
def test_a_charset_that_is_none_is_taken_for_utf_8(charset):
    page = Page("http://x/", 200, f"text/plain; charset={charset}", "é\\n-".encode() * 100_000, False)
    assert page_text(page).startswith("é\\n-")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schemes": ["file"]}, "schemes are http and https"),
        ({"seconds": 0}, "above 0"),
        ({"max_redirects": -1}, "at least 0"),
        ({"allowed_domains": ["https://example.org"]}, "a domain is a name"),
        ({"allow_addresses": ["10.0.0.1/8"]}, "networks such as"),
    ],
)
def test_wrong_settings_are_explained(options, message):
    with pytest.raises(ConfigError, match=message):
        FetchTool(**options)


def test_without_trafilatura_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"agentrl-toolkit\[tools\]"):
        FetchTool()


def test_the_schema_is_short():
    assert len(json.dumps(FetchTool().schema())) < 400


def test_importing_it_needs_no_heavy_package():
    program = "import sys, agentrl.tools.builtin.fetch\nprint('trafilatura' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "...", "a..b"])
def test_a_name_that_no_host_can_have_is_the_models_error(host):
    with pytest.raises(ToolError):
        asyncio.run(FetchTool(schemes=("http",))(f"http://{host}/"))
