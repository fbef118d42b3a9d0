"""Where a search tool gets its passages: an index in this process, or a server with Search-R1's HTTP API."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agentrl.concurrency.backend import Backend
from agentrl.errors import ConfigError, InfraError
from agentrl.retrieval.bm25 import Hit, Index
from agentrl.retrieval.corpus import parse_passage
from agentrl.values import check_number

_SAID_AFTER = 2
"""Retries of one search before the server counts as away: under load some searches are sent again."""

LONGEST_PAUSE = 10.0
"""Seconds between two attempts to reach a server that is away, at most (half as many again with jitter)."""

KEY_VARIABLE = "AGENTRL_RETRIEVER_KEY"
"""Environment variable that holds the key of the retrieval server, for client and server alike."""


class Retriever(Protocol):
    """What a search tool asks. Implementations are shared by all episodes and safe to use from threads."""

    @property
    def quick(self) -> bool:
        """Whether a search is so short (under a millisecond) that it may run on an event loop."""
        ...

    @property
    def patience(self) -> float | None:
        """Seconds after which a search that has not returned has raised; None where nothing is waited for."""
        ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first. Raises InfraError: the retrieval service does not answer."""
        ...


class LocalRetriever:
    """An :class:`Index` of this process, or what makes it when it is first wanted."""

    def __init__(self, index: Index | Callable[[], Index]) -> None:
        self._make = index if callable(index) else None
        self._index = None if callable(index) else index
        self._making = threading.Lock()
        self.patience: float | None = None

    @property
    def quick(self) -> bool:
        """Not while the index is still to be made."""
        return self._index is not None and len(self._index) <= 100_000

    @property
    def index(self) -> Index:
        """What is searched; made now if it is not there."""
        with self._making:
            if self._index is None and self._make is not None:
                self._index = self._make()
        assert self._index is not None
        return self._index

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first."""
        return (self.index if self._index is None else self._index).search(queries, topk)


class HttpRetriever:
    """A client of ``POST /retrieve`` as Search-R1's servers speak it.

    Request: ``{"queries": [str], "topk": int, "return_scores": true}``. Response: ``{"result": [[{"document":
    {"id", "contents"}, "score"}, ...] per query]}``; documents without scores are accepted too.

    A server that is away is waited for: connection errors, timeouts and answers 429 and 5xx are tried again, with
    pauses that double up to :data:`LONGEST_PAUSE` seconds, until ``patience`` is over. Meanwhile no episode begins
    (:class:`~agentrl.concurrency.backend.Backend`).

    Args:
        url: the server, with or without ``/retrieve``. It comes from the configuration, never from a model.
        api_key: sent as a bearer token; default: the environment variable ``AGENTRL_RETRIEVER_KEY``, if set.
        timeout: seconds one attempt may take, from the first byte to the last.
        patience: seconds for which a search waits for a server that is away; 0 tries once.
        backoff: seconds before the second attempt, doubled each time, with jitter.
        max_connections: requests in flight at once; more of them wait, no longer than ``patience``.
        max_bytes: largest answer that is read.
    """

    quick = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 10.0,
        patience: float = 300.0,
        backoff: float = 0.2,
        max_connections: int = 64,
        max_bytes: int = 16 << 20,
    ) -> None:
        import httpx

        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the retriever {url!r} is not a URL; expected http://host:port")
        check_number("patience", patience, 0, whole=False)
        self.url = url if url.endswith("/retrieve") else url + "/retrieve"
        key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE)
        self._timeout, self._wait, self._backoff, self._max_bytes = timeout, patience, backoff, max_bytes
        self.patience = patience + timeout
        self._slots = threading.BoundedSemaphore(max_connections)
        self._of_thread = threading.local()
        self._backend = Backend(f"the retrieval server {self.url}", self._probe, patience=patience)
        # Not compressed: a small answer could then become a very large one.
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._client = httpx.Client(
            timeout=timeout,
            headers=headers,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            trust_env=False,
        )

    @property
    def retries(self) -> int:
        """How often the last search of this thread was sent again."""
        return getattr(self._of_thread, "retries", 0)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first.
        Raises InfraError: no usable answer in time; the text says what the last attempt met."""
        payload: dict[str, Any] = {"queries": list(queries), "topk": topk, "return_scores": True}
        deadline, pause = time.monotonic() + self._wait, self._backoff
        problem = "no connection was free, the server is too slow for so many searches"
        self._of_thread.retries = 0
        while True:
            # A server under load is not the model's fault: the wait for a connection counts as waiting for an answer.
            if not self._slots.acquire(timeout=max(deadline - time.monotonic(), self._timeout)):
                break
            try:
                hits = _hits_of(self._asked(payload), len(payload["queries"]), topk, self.url)
                self._backend.up()
                return hits
            except _NoAnswer as error:
                problem = str(error)
                if not error.passing:
                    break
            finally:
                self._slots.release()
            if self.retries >= _SAID_AFTER:
                self._backend.down(problem)
            seconds = pause * random.uniform(0.5, 1.5)
            if time.monotonic() + seconds >= deadline:
                break
            time.sleep(seconds)
            pause = min(2 * pause, LONGEST_PAUSE)
            self._of_thread.retries += 1
        raise InfraError(
            f"the retrieval server {self.url} gave no answer after {self.retries + 1} attempts ({problem}); "
            f"start one with `agentrl serve-retriever`, or check its address and the key in ${KEY_VARIABLE}"
        )

    def _asked(self, payload: dict[str, Any]) -> bytes:
        """The body of one answer 200, within the time and size of an attempt. Raises _NoAnswer."""
        import httpx

        until = time.monotonic() + self._timeout
        try:
            with self._client.stream("POST", self.url, json=payload) as response:
                status, body = response.status_code, bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise _NoAnswer(f"an answer of more than {self._max_bytes:,} bytes", passing=False)
                    if time.monotonic() > until:  # byte by byte, each in time
                        raise _NoAnswer(f"an answer that was not complete within {self._timeout:g} s")
        except httpx.HTTPError as error:
            raise _NoAnswer(f"{type(error).__name__}: {error}") from error
        if status != 200:
            text = bytes(body[:200]).decode("utf-8", "replace")
            raise _NoAnswer(f"HTTP {status}: {text}", passing=status == 429 or status >= 500)
        return bytes(body)

    def _probe(self) -> None:
        try:
            self._asked({"queries": ["."], "topk": 1, "return_scores": True})
        except _NoAnswer as error:
            if error.passing:
                raise

    def close(self) -> None:
        """Close the connections."""
        self._backend.up()
        self._client.close()


class _NoAnswer(Exception):
    """An attempt got no usable answer. ``passing``: another one may."""

    def __init__(self, text: str, passing: bool = True) -> None:
        super().__init__(text)
        self.passing = passing


def _hits_of(body: bytes, expected: int, topk: int, url: str) -> list[list[Hit]]:
    try:
        result = json.loads(body)["result"]
        hits = [[_hit(item) for item in per_query[:topk]] for per_query in result]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InfraError(
            f"{url} answered something else than {{'result': [[{{'document', 'score'}}]]}}: {error!r:.300}"
        ) from error
    if len(hits) != expected:
        raise InfraError(f"{url} answered {len(hits)} result lists to {expected} queries")
    return hits


def _hit(item: Any) -> Hit:
    if not isinstance(item, dict):
        raise TypeError(f"a result is {type(item).__name__}, not an object")
    document = item.get("document", item)
    return Hit(parse_passage(document, 0), float(item.get("score", 0.0)))
