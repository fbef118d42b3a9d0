"""Serve retrieval over HTTP in Search-R1's format: ``POST /retrieve``, ``GET /health``.

Listens on loopback unless told otherwise, and then asks for a key.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from typing import Any

import pydantic

from agentrl.errors import ConfigError
from agentrl.processes.network import is_loopback
from agentrl.retrieval.bm25 import Hit, Index
from agentrl.retrieval.retriever import KEY_VARIABLE, LocalRetriever, Retriever
from agentrl.versions import imported

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
    for name in ("starlette", "uvicorn"):
        imported(name, "serving retrieval", "retriever")
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
            query = Query.model_validate_json(body)
        except pydantic.ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)[0]
            return refuse(400, f"{'.'.join(map(str, wrong['loc'])) or 'request'}: {wrong['msg']}")
        results = await run_in_threadpool(retriever.search, query.queries, query.topk or default_topk)
        return JSONResponse({"result": [[_item(hit, query.return_scores) for hit in hits] for hits in results]})

    async def health(_: Any) -> Any:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


class Query(pydantic.BaseModel):
    """What ``/retrieve`` is asked; see :func:`create_app`."""

    model_config = pydantic.ConfigDict(strict=True)

    queries: list[str] = pydantic.Field(max_length=MAX_QUERIES)
    topk: int | None = pydantic.Field(None, ge=1, le=MAX_TOPK)
    return_scores: bool = False


def _item(hit: Hit, with_scores: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if with_scores else document


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
    if not api_key and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines and no key is set: "
            f"put one in the environment variable {KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    index = make_index()
    server = make_server(create_app(LocalRetriever(index), api_key=api_key, default_topk=topk))
    with listen(host, port) as listener:
        at = f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        guarded = "with a key" if api_key else "without a key"
        print(f"serving {len(index):,} passages on http://{at}/retrieve ({guarded}); Ctrl-C ends it", flush=True)
        server.run(sockets=[listener])


def make_server(app: Any) -> Any:
    """uvicorn with an application of :func:`create_app`."""
    import uvicorn

    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5))


def listen(host: str, port: int) -> socket.socket:
    """A socket on which requests wait from now on. Raises ConfigError where the port is in use."""
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
