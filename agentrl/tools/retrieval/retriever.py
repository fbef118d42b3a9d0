"""Where a search tool gets its passages: an index in this process, or a server with Search-R1's HTTP API."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.errors import ConfigError, InfraError
from agentrl.tools.retrieval.bm25 import Hit, Index
from agentrl.tools.retrieval.corpus import parse_passage
from agentrl.tools.retrieval.passages import Passage

KEY_VARIABLE = "AGENTRL_RETRIEVER_KEY"
"""Environment variable that holds the key of the retrieval server, for client and server alike."""


class Retriever(Protocol):
    """What a search tool asks. Implementations are shared by all episodes and safe to use from threads."""

    quick: bool
    """Whether a search is so short (under a millisecond) that it may run on an event loop."""
    patience: float | None
    """Seconds after which a search that has not returned has raised; None where nothing is waited for."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first.

        Raises:
            InfraError: the retrieval service does not answer.
        """
        ...


class LocalRetriever:
    """An :class:`Index` of this process."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.quick = len(index) <= 100_000
        self.patience = None

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first."""
        return self._index.search(queries, topk)


class HttpRetriever:
    """A client of ``POST /retrieve`` as Search-R1's servers speak it.

    Request: ``{"queries": [str], "topk": int, "return_scores": true}``. Response: ``{"result": [[{"document":
    {"id", "contents"}, "score"}, ...] per query]}``; documents without scores are accepted too.

    Args:
        url: the server, with or without ``/retrieve``. It comes from the configuration, never from a model.
        api_key: sent as a bearer token; default: the environment variable ``AGENTRL_RETRIEVER_KEY``, if set.
        timeout: seconds one attempt may take.
        retries: further attempts after connection errors, timeouts and answers 429 and 5xx.
        backoff: seconds before the first retry, doubled each time, with jitter.
        max_connections: requests in flight at once; more of them wait, no longer than all attempts may take.
    """

    quick = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 0.2,
        max_connections: int = 64,
    ) -> None:
        import httpx

        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the retriever {url!r} is not a URL; expected http://host:port")
        self.url = url if url.endswith("/retrieve") else url + "/retrieve"
        key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE)
        self._timeout, self._retries = timeout, retries
        waits = sum(1.5 * backoff * 2**attempt for attempt in range(retries))
        self.patience = (retries + 1) * timeout + waits
        self._backoff = backoff
        self._slots = threading.BoundedSemaphore(max_connections)
        self._client = httpx.Client(
            timeout=timeout,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            trust_env=False,
        )

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first.

        Raises:
            InfraError: no usable answer after all attempts; the text says what the last one met.
        """
        import httpx

        payload = {"queries": list(queries), "topk": topk, "return_scores": True}
        problem, deadline = "", time.monotonic() + self.patience
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(self._backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            # A server under load is not the model's fault: the wait for a connection counts as waiting for an answer.
            if not self._slots.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                problem = problem or "no connection was free, the server is too slow for so many searches"
                break
            try:
                seconds = max(min(self._timeout, deadline - time.monotonic()), 0.01)
                response = self._client.post(self.url, json=payload, timeout=seconds)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            finally:
                self._slots.release()
            if response.status_code == 200:
                return _hits_of(response, len(payload["queries"]), self.url)
            problem = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code != 429 and response.status_code < 500:
                break
        raise InfraError(
            f"the retrieval server {self.url} gave no answer after {attempt + 1} attempts ({problem}); "
            f"start one with `agentrl serve-retriever`, or check its address and the key in ${KEY_VARIABLE}"
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _hits_of(response: Any, expected: int, url: str) -> list[list[Hit]]:
    try:
        result = response.json()["result"]
        hits = [[_hit(item) for item in per_query] for per_query in result]
    except (ValueError, KeyError, TypeError) as error:
        raise InfraError(
            f"{url} answered something else than {{'result': [[{{'document', 'score'}}]]}}: {error!r}"
        ) from error
    if len(hits) != expected:
        raise InfraError(f"{url} answered {len(hits)} result lists to {expected} queries")
    return hits


def _hit(item: Any) -> Hit:
    if not isinstance(item, dict):
        raise TypeError(f"a result is {type(item).__name__}, not an object")
    document = item.get("document", item)
    passage: Passage = parse_passage(document, 0)
    return Hit(passage, float(item.get("score", 0.0)))
