"""``FetchTool``: the text of a web page, from public addresses only and within bounds."""

from __future__ import annotations

import asyncio
import codecs
import functools
import html
import importlib.util
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import httpcore
import httpx

from agentrl.concurrency.threads import run_blocking
from agentrl.errors import ConfigError
from agentrl.tools.arguments import shorten
from agentrl.tools.base import Tool, ToolError, ToolErrorType, ToolResult
from agentrl.tools.builtin.addresses import AddressRefused, Guard, GuardedBackend, Resolver
from agentrl.tools.builtin.page_reader import read_page
from agentrl.versions import DISTRIBUTION, install_command

MAX_URL = 2000
"""Characters of a URL."""
MAX_TAGS = 20_000
"""Tags of a page from which the article is told apart; of a page with more, all text is taken (a page made to be
slow would take minutes)."""
USER_AGENT = DISTRIBUTION

_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT = re.compile(
    r"text/[\w.+-]+|application/(?:[\w.-]+\+)?(?:json|xml)|application/(?:x-ndjson|javascript|yaml|toml)"
)
# Python knows codecs that are no character sets, some of which (punycode) take minutes for a page.
_CHARSET = re.compile(r"utf-(8|16|32)|ascii|iso(8859|2022)|cp\d|koi8|mac|gb|hz|big5|euc|shift_jis|johab|tis-620")
_TITLE = re.compile(r"<title[^>]{0,200}>([^<]{1,300})", re.IGNORECASE)


@dataclass(frozen=True)
class Page:
    """An answer: ``body`` unpacked, ``cut`` when more of it was left unread."""

    url: str
    status: int
    content_type: str
    body: bytes
    cut: bool


class FetchTool(Tool):
    """Reads a web page as text.

    Only public addresses are reached. A host's name is resolved once, every address is checked, and the
    connection goes to the checked address; each redirect is checked again. So a model cannot reach this
    machine, its network, or a cloud's metadata service, by whatever name or number. Neither proxies nor cookies
    nor credentials are used, and the environment is not read.

    HTML becomes text by trafilatura (extra ``tools``), in a process with a limit of CPU time; other text is shown as it
    is. robots.txt is not read.

    Args:
        allowed_domains: If given, only these and their subdomains.
        blocked_domains: Never these and their subdomains.
        schemes: Of URLs.
        ports: That may be connected to.
        max_redirects: Redirects that are followed.
        max_bytes: Of a page, unpacked; the rest is not read.
        max_chars: Of the text that the model sees.
        seconds: For everything: names, redirects, the page, its text.
        allow_addresses: Networks that may be reached although they are not public, such as ``10.1.0.0/16``: for
            an intranet, and for tests. The model can then reach whatever listens there.
        resolver: In place of the system's resolver, from a name to its addresses.

    Raises:
        ConfigError: A setting is out of range, or trafilatura is not installed.
    """

    name = "fetch"
    description = "Reads a web page as text."
    shared = True

    def __init__(
        self,
        *,
        allowed_domains: Sequence[str] | None = None,
        blocked_domains: Sequence[str] = (),
        schemes: Sequence[str] = ("https", "http"),
        ports: Sequence[int] = (80, 443),
        max_redirects: int = 5,
        max_bytes: int = 2_000_000,
        max_chars: int = 8_000,
        seconds: float = 20.0,
        allow_addresses: Iterable[str] = (),
        resolver: Resolver | None = None,
    ) -> None:
        if importlib.util.find_spec("trafilatura") is None:
            raise ConfigError(f"FetchTool needs trafilatura: {install_command('tools')}")
        if not set(schemes) <= {"http", "https"}:
            raise ConfigError(f"schemes are http and https, got {list(schemes)}")
        if max_redirects < 0 or min(max_bytes, max_chars, seconds) <= 0:
            raise ConfigError("max_bytes, max_chars and seconds are above 0, max_redirects at least 0")
        for domain in (*(allowed_domains or ()), *blocked_domains):
            if not domain or "/" in domain or ":" in domain:
                raise ConfigError(f"a domain is a name such as example.org, got {domain!r}")
        try:
            self.guard = Guard(allow_addresses, resolver)
        except ValueError as error:
            raise ConfigError(f"allow_addresses: {error}; networks such as 10.1.0.0/16 are expected") from error
        self.allowed_domains = None if allowed_domains is None else [_domain(d) for d in allowed_domains]
        self.blocked_domains = [_domain(d) for d in blocked_domains]
        self.schemes, self.ports = tuple(schemes), tuple(ports)
        self.max_redirects, self.max_bytes, self.max_chars = max_redirects, max_bytes, max_chars
        self.seconds = seconds
        self.timeout = seconds + 5.0  # its own words, not those of the tool call's deadline

    async def __call__(self, url: str) -> ToolResult:
        """Args:
        url: The full address, such as https://example.org/page.
        """
        try:
            async with asyncio.timeout(self.seconds):
                page = await self._page(url)
                text = await run_blocking(read_page, page.url, page.content_type, page.body, self.seconds)
        except TimeoutError:
            raise ToolError(
                f"fetch: {_named(url)} took longer than {self.seconds:g} s", ToolErrorType.TIMEOUT
            ) from None
        length = len(text)
        if length > self.max_chars:
            text = f"{text[: self.max_chars]}\n[{length - self.max_chars} more characters cut]"
        if page.cut:
            text = f"{text}\n[only the first {self.max_bytes} bytes of the page were read]"
        metadata = {"url": page.url, "status": page.status, "bytes": len(page.body)}
        return ToolResult(f"{page.url}\n{text or '[no text]'}", metadata=metadata)

    def allowed_url(self, url: str) -> httpx.URL:
        """The address, if by its form it may be fetched; what it resolves to is checked on connecting.
        Raises ToolError: the text says what is wrong with it."""
        if len(url) > MAX_URL:
            _refuse(f"a URL has at most {MAX_URL} characters, this one has {len(url)}")
        try:
            parsed = httpx.URL(url.strip())
            host, port = parsed.raw_host.decode("ascii"), parsed.port
        except (httpx.InvalidURL, UnicodeError, ValueError, TypeError):
            _refuse(f"{_named(url)} is not a URL; write it in full, such as https://example.org/page")
        if parsed.scheme not in self.schemes:
            _refuse(f"{_named(url)} must begin with {' or '.join(f'{s}://' for s in self.schemes)}")
        if not host:
            _refuse(f"{_named(url)} names no host")
        if parsed.userinfo:
            _refuse("a URL with a user name or password is not fetched")
        port = {"http": 80, "https": 443}[parsed.scheme] if port is None else port
        if port not in self.ports:
            _refuse(f"port {port} is not allowed; allowed are {', '.join(map(str, self.ports))}")
        domain = _domain(host)
        if self.allowed_domains is not None and not _is_in(domain, self.allowed_domains):
            _refuse(f"{shorten(host, 80)} is not allowed; allowed are {shorten(', '.join(self.allowed_domains), 200)}")
        if _is_in(domain, self.blocked_domains):
            _refuse(f"{shorten(host, 80)} is blocked")
        return parsed

    async def _page(self, url: str) -> Page:
        """The answer at the end of the redirects."""
        parsed = self.allowed_url(url)
        try:
            # Nothing is kept between fetches: no connection, no cookie.
            backend = GuardedBackend(self.guard)
            async with httpcore.AsyncConnectionPool(ssl_context=_ssl_context(), network_backend=backend) as pool:
                for _ in range(self.max_redirects + 1):
                    page = await self._get(pool, parsed)
                    if isinstance(page, Page):
                        return page
                    parsed = self.allowed_url(page)
        except AddressRefused as error:
            _refuse(f"{error}; only public web pages can be read")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            _refuse(f"{shorten(parsed.raw_host.decode('ascii'), 80)} cannot be read ({_reason(error)})")
        _refuse(f"{_named(url)} redirects more than {self.max_redirects} times")

    async def _get(self, pool: httpcore.AsyncConnectionPool, url: httpx.URL) -> Page | str:
        """The page, or where the server says it is."""
        headers = {
            "Host": url.netloc.decode("ascii"),
            "User-Agent": USER_AGENT,
            "Accept": "text/html, text/plain;q=0.9, application/json;q=0.8, */*;q=0.1",
            "Accept-Encoding": "gzip",
        }
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        async with pool.stream("GET", target, headers=list(headers.items())) as response:
            given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and "location" in given:
                try:
                    return str(url.join(given["location"]).copy_with(fragment=None))
                except (httpx.InvalidURL, ValueError):
                    _refuse(f"{_named(str(url))} redirects to something that is not a URL")
            if response.status >= 400:
                _refuse(f"{_named(str(url))} answered HTTP {response.status}")
            kind = given.get("content-type", "text/plain")
            if not _TEXT.fullmatch(kind.partition(";")[0].strip().lower() or "text/plain"):
                _refuse(f"{_named(str(url))} is {shorten(kind, 60)}, which cannot be read as text")
            body, cut = await _unpacked(response, given.get("content-encoding", ""), self.max_bytes)
            return Page(str(url), response.status, kind, body, cut)


async def _unpacked(response: httpcore.Response, encoding: str, limit: int) -> tuple[bytes, bool]:
    """At most ``limit`` bytes of the body, unpacked piece by piece so that no little can become much."""
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        _refuse(f"the page is packed as {shorten(encoding, 30)}, which was not asked for")
    unpack = zlib.decompressobj(wbits=47) if encoding not in ("", "identity") else None
    body = bytearray()
    async for chunk in response.aiter_stream():
        if unpack is None:
            body += chunk
        else:
            try:
                body += unpack.decompress(chunk, limit + 1 - len(body))
            except zlib.error:
                _refuse("the page cannot be unpacked")
        if len(body) > limit:
            return bytes(body[:limit]), True
        if unpack is not None and unpack.eof:
            break  # what follows the packed page would be kept, without end
    return bytes(body), False


def page_text(page: Page) -> str:
    """A page as text: title and article of HTML, anything else as it is.
    Raises ToolError: it is not text, whatever its type says."""
    if b"\0" in page.body[:1000] and not page.body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        _refuse(f"{_named(page.url)} is not text")
    text = _decoded(page)
    if "html" not in page.content_type and not text.lstrip()[:15].lower().startswith(("<!doctype html", "<html")):
        return text.strip()
    import trafilatura

    title = _TITLE.search(text)
    if text.count("<") > MAX_TAGS:
        article = trafilatura.html2txt(text)
    else:
        article = trafilatura.extract(text, include_comments=False) or trafilatura.html2txt(text)
    heading = html.unescape(title.group(1)).strip() if title else ""
    return "\n\n".join(part for part in (heading, (article or "").strip()) if part)


def _decoded(page: Page) -> str:
    declared = re.search(r"charset=[\"']?([\w-]{1,40})", page.content_type)
    declared = declared or re.search(r"<meta[^>]{1,200}charset=[\"']?([\w-]{1,40})", page.body[:2000].decode("latin-1"))
    try:
        encoding = codecs.lookup(declared.group(1)).name if declared else "utf-8"
    except LookupError:
        encoding = "utf-8"
    return page.body.decode(encoding if _CHARSET.match(encoding) else "utf-8", "replace")


@functools.lru_cache(maxsize=1)
def _ssl_context() -> Any:
    return httpx.create_ssl_context(trust_env=False)


def _domain(name: str) -> str:
    name = name.strip().rstrip(".").lower()
    try:
        return name.encode("idna").decode("ascii") if not name.isascii() else name
    except UnicodeError as error:
        raise ConfigError(f"{name!r} is not the name of a domain") from error


def _is_in(domain: str, domains: Sequence[str]) -> bool:
    return any(domain == parent or domain.endswith(f".{parent}") for parent in domains)


def _named(url: str) -> str:
    return shorten(url, 200)


def _reason(error: Exception) -> str:
    if isinstance(error, httpcore.ConnectError):
        return "no connection"
    if isinstance(error, (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)):
        return re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).lower()
    return "its name has no address"


def _refuse(text: str) -> NoReturn:
    raise ToolError(f"fetch: {text}.")
