"""Serve retrieval over HTTP in Search-R1's format: ``POST /retrieve``, ``GET /health``.

Listens on loopback unless told otherwise, and then asks for a key.
"""

from __future__ import annotations

import hmac
import importlib.util
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from agentrl.errors import ConfigError
from agentrl.retrieval.bm25 import Hit, Index
from agentrl.retrieval.retriever import KEY_VARIABLE, LocalRetriever, Retriever
from agentrl.versions import install_command

MAX_BODY = 4 * 2**20
"""Bytes of a request; longer ones are answered 413."""
MAX_QUERIES = 1024
MAX_TOPK = 1000


def create_app(retriever: Retriever, *, api_key: str | None = None, default_topk: int = 3) -> Any:
    """The service as a Starlette application.

    ``POST /retrieve`` takes ``{"queries": [str], "topk": int | null, "return_scores": bool}`` and answers
    ``{"result": [[{"document": {"id", "contents"}, "score"}]]}``, or bare documents when scores are not wanted.
    Bad requests are answered 400 with ``{"error": text}``, a missing or wrong key 401.
    """
    _check_installed()
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def refuse(status: int, text: str) -> Any:
        return JSONResponse({"error": text}, status_code=status)

    async def retrieve(request: Any) -> Any:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if api_key and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            return refuse(401, "a key is needed: send it as the header 'Authorization: Bearer KEY'")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return refuse(413, f"the request is longer than {MAX_BODY} bytes")
        try:
            queries, topk, with_scores = parse_request(body, default_topk)
        except ValueError as error:
            return refuse(400, str(error))
        results = await run_in_threadpool(retriever.search, queries, topk)
        return JSONResponse({"result": [[_item(hit, with_scores) for hit in hits] for hits in results]})

    async def health(_: Any) -> Any:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


def parse_request(body: bytes, default_topk: int) -> tuple[list[str], int, bool]:
    """Queries, number of hits and whether scores are wanted.

    Raises:
        ValueError: the body is not a request; the text says what was expected.
    """
    try:
        request = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(request, dict):
        raise ValueError(f"expected a JSON object, got {type(request).__name__}")
    queries = request.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError('"queries" must be a list of strings')
    if len(queries) > MAX_QUERIES:
        raise ValueError(f'"queries" holds {len(queries)} queries; at most {MAX_QUERIES} at once')
    topk = request.get("topk")
    topk = default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f'"topk" must be a whole number from 1 to {MAX_TOPK}, got {topk!r}')
    with_scores = request.get("return_scores", False)
    if not isinstance(with_scores, bool):
        raise ValueError(f'"return_scores" must be true or false, got {with_scores!r}')
    return queries, topk, with_scores


def _item(hit: Hit, with_scores: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if with_scores else document


class RetrievalServer:
    """An application served from a thread of this process.

    Args:
        app: from :func:`create_app`.
        host: address to listen on.
        port: 0 takes a free one.

    Example:
        >>> from agentrl.retrieval import Passage, build_in_memory
        >>> index = build_in_memory([Passage("1", "Nile", "Nile is a river.")])
        >>> with RetrievalServer(create_app(LocalRetriever(index))) as server:
        ...     server.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0) -> None:
        _check_installed()
        import uvicorn

        self._socket = _listen(host, port)
        bound = self._socket.getsockname()
        self.url = f"http://[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"http://{bound[0]}:{bound[1]}"
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve in the calling thread until interrupted."""
        self._server.run(sockets=[self._socket])

    def start(self, timeout: float = 10.0) -> RetrievalServer:
        """Serve from a thread; returns once requests are answered.

        Raises:
            TimeoutError: it is not up after ``timeout`` seconds.
        """
        self._thread = threading.Thread(target=self.run, name="agentrl-retrieval-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + timeout
        while not self._server.started:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the retrieval server at {self.url} was not up after {timeout} s")
            time.sleep(0.01)
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """Stop serving and free the port. May be called twice."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout)
        self._socket.close()

    def __enter__(self) -> RetrievalServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(make_index: Callable[[], Index], host: str = "127.0.0.1", port: int = 8000, *, topk: int = 3) -> None:
    """Serve an index until interrupted; what ``agentrl serve-retriever`` runs.

    Args:
        make_index: opens or builds it.
        host: address to listen on. Anything but loopback needs a key in ``AGENTRL_RETRIEVER_KEY``.
        port: 0 takes a free one, which is printed.
        topk: hits a query where the request says none.

    Raises:
        ConfigError: no key for an address that others can reach, or the port is in use.
    """
    api_key = os.environ.get(KEY_VARIABLE) or None
    if not api_key and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines and no key is set: "
            f"put one in the environment variable {KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    index = make_index()
    app = create_app(LocalRetriever(index), api_key=api_key, default_topk=topk)
    server = RetrievalServer(app, host=host, port=port)
    guarded = "with a key" if api_key else "without a key"
    print(f"serving {len(index):,} passages on {server.url}/retrieve ({guarded}); Ctrl-C ends it", flush=True)
    server.run()


def _check_installed() -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving retrieval needs {' and '.join(missing)}: {install_command('retriever')}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # from here on requests wait instead of being refused
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; "
            "choose another --port, or 0 for a free one"
        ) from error
    return listener
