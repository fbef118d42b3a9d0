"""The policy client: token ids in, token ids with log-probabilities and weight versions out.

Kept-alive connections, orjson, numpy arrays: this is the hot path of a rollout. An engine
that dies mid-request costs a trajectory time and nothing else: the request is sent again, under a new
request id and, after a failure, a new routing key, so that a sticky router tries another engine.
"""

from __future__ import annotations

import asyncio
import functools
import math
import operator
import os
import random
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from agentrl.concurrency.pace import Pace
from agentrl.errors import EngineError
from agentrl.rollout.policies.http import HttpPost
from agentrl.rollout.sampling import request_fields
from agentrl.types import Generation, SamplingParams, replace

ROUTING_HEADER = "X-SMG-Routing-Key"
# Worth another try: the server's trouble, or its word that it is busy.
_TRANSIENT = frozenset({408, 425, 429})
# SGLang's refusal of a request that it still has, of an attempt whose connection was lost at once.
_STILL_RUNNING = "Duplicate request ID detected"
_REMEMBERED_MOVES = 65536
_LOGPROB, _ID = operator.itemgetter(0), operator.itemgetter(1)  # of a sampled token, in an answer


class PolicyClient(Protocol):
    """Anything that samples from the policy."""

    async def generate(
        self, input_ids: np.ndarray, params: SamplingParams, *, rid: str, routing_key: str, timeout: float
    ) -> Generation:
        """Sample a continuation of ``input_ids`` (int32 ``[n]``) within ``timeout`` seconds.
        Raises EngineError: no valid answer within the retry policy."""
        ...


@dataclass
class ClientCounters:
    """Totals since the client was made. ``engine_seconds`` sums over concurrent requests, ``busy_seconds`` is how long
    there was at least one."""

    requests: int = 0
    retries: int = 0
    continuations: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    engine_seconds: float = 0.0
    busy_seconds: float = 0.0


class _Retryable(Exception):
    """An attempt failed in a way that another one may not."""


class EngineClient:
    """Talks to SGLang's ``/generate``, directly or through sglang-router.

    Args:
        base_url: ``http://host:port`` of the router or of one engine.
        api_key: sent as a bearer token; None for servers without one.
        attempt_timeout: seconds one attempt may take before it is sent elsewhere.
        backoff: seconds before the first retry; doubles up to ``max_backoff``, with full jitter.

    Use as an async context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        attempt_timeout: float = 300.0,
        backoff: float = 0.1,
        max_backoff: float = 3.0,
    ) -> None:
        self._url = base_url.rstrip("/") + "/generate"
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = HttpPost(self._url, headers)
        self._attempt_timeout = attempt_timeout
        self._backoff, self._max_backoff = backoff, max_backoff
        self._sampling: tuple[SamplingParams | None, Any] = (None, None)  # the last ones, as JSON
        self._moves: OrderedDict[str, int] = OrderedDict()
        self._pace = Pace()
        self.counters = ClientCounters()
        self._in_flight, self._counted_at = 0, 0.0

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The client can be used again afterwards."""
        await self._http.close()

    def metrics(self) -> dict[str, float]:
        """The counters as one flat dict."""
        self._count_busy(0)
        return asdict(self.counters)

    async def generate(
        self, input_ids: np.ndarray, params: SamplingParams, *, rid: str, routing_key: str, timeout: float
    ) -> Generation:
        """See :class:`PolicyClient`. An answer that the engine cut short (``abort``, as a weight update
        may) is continued from its tokens; the parts then differ in version.
        """
        started = time.monotonic()
        deadline = started + timeout
        ids = np.ascontiguousarray(input_ids, np.int32)
        parts: list[Generation] = []
        delay, key, missing = self._backoff, routing_key, params.max_new_tokens
        self._count_busy(1)
        try:
            while True:
                part = await self._attempts(ids, params, rid, key, deadline, timeout)
                parts.append(part)
                missing -= len(part.tokens)
                if part.finish_reason != "abort" or missing <= 0:
                    break
                self.counters.continuations += 1
                rid = new_rid()
                if len(part.tokens):
                    ids, params = np.concatenate([ids, part.tokens]), replace(params, max_new_tokens=missing)
                    delay = self._backoff
                else:
                    await self._pause(delay, deadline, timeout, "the engine aborts every request")
                    delay = min(2 * delay, self._max_backoff)
        except EngineError:
            self.counters.failures += 1
            raise
        finally:
            self._count_busy(-1)
        if len(parts) > 1 or part.finish_reason == "abort":
            part = Generation(
                tokens=np.concatenate([p.tokens for p in parts]),
                logprobs=np.concatenate([p.logprobs for p in parts]),
                versions=np.concatenate([p.versions for p in parts]),
                finish_reason="length" if part.finish_reason == "abort" else part.finish_reason,
                cached_tokens=parts[0].cached_tokens,
                prompt_tokens=len(input_ids),
                seconds=time.monotonic() - started,
            )
        counters = self.counters
        counters.requests += 1
        counters.prompt_tokens += part.prompt_tokens
        counters.cached_tokens += part.cached_tokens
        counters.output_tokens += len(part.tokens)
        counters.engine_seconds += part.seconds
        return part

    def _count_busy(self, more: int) -> None:
        """So many requests more are in flight from now on."""
        now = time.monotonic()
        if self._in_flight:
            self.counters.busy_seconds += now - self._counted_at
        self._in_flight, self._counted_at = self._in_flight + more, now

    async def _attempts(
        self, ids: np.ndarray, params: SamplingParams, rid: str, key: str, deadline: float, timeout: float
    ) -> Generation:
        """One answer, whatever number of attempts it takes until ``deadline``."""
        import orjson  # not in the light install

        if params is not self._sampling[0]:
            self._sampling = params, _sampling_json(params)
        body = {"input_ids": ids, "sampling_params": self._sampling[1], "return_logprob": True, "rid": rid}
        payload = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        delay, reason, started = self._backoff, "no time left to ask", time.monotonic()
        while True:
            seconds = min(self._attempt_timeout, deadline - time.monotonic())
            if seconds <= 0:
                raise self._no_answer(timeout, reason)
            try:
                moves = self._moves.get(key)
                content = await self._exchange(payload, f"{key}~{moves}" if moves else key, seconds)
                await self._pace.wait()  # many answers may be there at once
                return _parse(content, len(ids), params.max_new_tokens, started)
            except _Retryable as error:
                reason = str(error)
            self.counters.retries += 1
            self._move(key)
            await self._pause(delay, deadline, timeout, reason)
            delay = min(2 * delay, self._max_backoff)
            # The earlier attempt may still run somewhere: an engine refuses a request id it knows.
            body["rid"] = new_rid()
            payload = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    async def _exchange(self, payload: bytes, key: str, seconds: float) -> bytes:
        """The body of one answer with status 200."""
        try:
            status, content = await self._http.post(payload, ROUTING_HEADER, key, timeout=seconds)
        except TimeoutError:
            raise _Retryable(f"no answer in {seconds:.1f} s") from None
        except OSError as error:
            raise _Retryable(f"{type(error).__name__}: {error}") from error
        if status == 200:
            return content
        text = content[:2000].decode("utf-8", "replace")
        if status >= 500 or status in _TRANSIENT or _STILL_RUNNING in text:
            raise _Retryable(f"HTTP {status}: {text[:300]}")
        raise EngineError(f"{self._url} refused the request with HTTP {status}: {text}")

    async def _pause(self, delay: float, deadline: float, timeout: float, reason: str) -> None:
        delay *= random.uniform(0.5, 1.0)
        if time.monotonic() + delay >= deadline:
            raise self._no_answer(timeout, reason)
        await asyncio.sleep(delay)

    def _no_answer(self, timeout: float, reason: str) -> EngineError:
        return EngineError(
            f"{self._url} gave no answer within {timeout:g} s; last: {reason}. "
            f"See the engine's log; a longer deadline is --engine-timeout"
        )

    def _move(self, key: str) -> None:
        """Route ``key`` elsewhere from now on; the prefix cache is then where it went last."""
        self._moves[key] = self._moves.pop(key, 0) + 1
        if len(self._moves) > _REMEMBERED_MOVES:
            self._moves.popitem(last=False)


def _parse(content: bytes, prompt_tokens: int, max_new_tokens: int, started: float) -> Generation:
    """An answer's bytes to arrays. ``started`` is when it was asked for (monotonic seconds).
    Raises EngineError: not the answer of ``/generate`` with log-probabilities, or one of them is null.
    Raises _Retryable: the body is torn."""
    import orjson

    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _Retryable(f"the answer is not JSON ({error}): {content[:80]!r}") from error
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        output = answer["output_ids"]
        triples = meta["output_token_logprobs"]
        ids, tokens = list(map(_ID, triples)), np.array(output, np.int32)
        # null (orjson's and SGLang's way to write NaN) becomes NaN.
        logprobs = np.array(list(map(_LOGPROB, triples)), np.float32)
        versions = _versions(meta, len(tokens))
        reason = finish["type"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"unexpected answer of /generate ({type(error).__name__}: {error}): {content[:300]!r}; "
            f"expected output_ids and meta_info with output_token_logprobs, finish_reason and weight_version"
        ) from error
    if reason == "abort" and (finish.get("status_code") or 500) < 500:
        raise EngineError(f"the engine refused the request: {finish.get('message')}")
    if ids != output:
        raise EngineError(f"{len(output)} output ids do not match {len(ids)} log-probabilities")
    if not math.isfinite(np.add.reduce(logprobs)):
        raise EngineError(
            "the engine returned a log-probability that is null or not finite; "
            "its weights or activations hold NaN: check the last weight update and the loss"
        )
    if len(tokens) > max_new_tokens:
        raise EngineError(f"{len(tokens)} tokens came back, {max_new_tokens} were asked for")
    cached, seconds = int(meta.get("cached_tokens", 0)), time.monotonic() - started
    return Generation(tokens, logprobs, versions, reason, cached, prompt_tokens, seconds)


def new_rid() -> str:
    """A request id: 32 random hex digits. One width, because SGLang aborts by prefix."""
    return os.urandom(16).hex()


@functools.lru_cache(maxsize=1024)
def _sampling_json(params: SamplingParams) -> Any:
    import orjson

    return orjson.Fragment(orjson.dumps(request_fields(params)))


def _versions(meta: dict[str, Any], n: int) -> np.ndarray:
    """int32 ``[n]``: the weight version of each output token."""
    spans = meta.get("weight_versions") or [{"start": 0, "end": n, "version": meta["weight_version"]}]
    versions = np.empty(n, np.int32)
    versions.fill(-1)
    for span in spans:
        versions[span["start"] : span["end"]] = version_number(span["version"])
    if n and np.minimum.reduce(versions) < 0:
        raise ValueError(f"weight versions {spans} leave out some of {n} tokens")
    return versions


def version_number(version: str) -> int:
    """An engine's weight version as an int; an engine that was never updated says ``default``: 0."""
    return 0 if version == "default" else int(version)
