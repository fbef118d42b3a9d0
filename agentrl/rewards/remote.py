"""A reward asked of a server: one JSON request for each episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from agentrl.errors import ConfigError, InfraError

ATTEMPTS = 6
FIRST_WAIT = 1.0
"""Seconds before the second try; each further one waits twice as long."""
MOST_BYTES = 1 << 20


class RemoteReward:
    """Sends ``{"prompt", "response", "label"}`` to ``url`` and takes the number, or the dict of parts, of the reply.

    Args:
        url: Where to POST, ``http://HOST:PORT/PATH``.
        timeout: Seconds of one request.

    Raises:
        ConfigError: ``url`` is no http address.
        InfraError: No usable reply in several tries with pauses of half a minute in all, or the request was refused
            (a status 4xx other than 408 and 429); the episode is not scored.
    """

    name = "remote_rm"

    def __init__(self, url: str, timeout: float = 120.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--rm-url: expected http://HOST:PORT/PATH, got {url!r}")
        self.url = url
        self.timeout = timeout

    async def __call__(self, text: str, answer: Any, row: Mapping[str, Any]) -> Any:
        request = {"prompt": row.get("prompt"), "response": text, "label": answer}
        for wait in (*(FIRST_WAIT * 2**attempt for attempt in range(ATTEMPTS - 1)), None):
            try:
                async with asyncio.timeout(self.timeout):
                    return await self._ask(request)
            except (httpx.HTTPError, ValueError, RecursionError, TimeoutError) as error:
                said = f"{type(error).__name__}: {error}" if str(error) else f"no reply within {self.timeout:g} s"
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
                if 400 <= status < 500 and status not in (408, 429):
                    raise InfraError(f"the reward server {self.url} refuses the request: {said}") from error
            if wait is not None:
                await asyncio.sleep(wait)
        raise InfraError(f"the reward server {self.url} gave no reward in {ATTEMPTS} tries; the last time: {said}")

    async def _ask(self, request: dict[str, Any]) -> Any:
        """One request. Raises httpx.HTTPError, and what a reply that is no JSON number or object raises."""
        async with (
            httpx.AsyncClient(timeout=self.timeout) as client,
            client.stream("POST", self.url, json=request, headers={"accept-encoding": "identity"}) as reply,
        ):
            reply.raise_for_status()
            body = b""
            async for chunk in reply.aiter_raw():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise ValueError(f"a reply of more than {MOST_BYTES} bytes")
        value = json.loads(body)
        if isinstance(value, bool) or not isinstance(value, (int, float, dict)):
            raise ValueError(f"expected a number or an object of numbers, got {body[:80]!r}")
        return value
