"""Messages between caller, supervisor and interpreter: JSON with its length before it. Never pickle."""

from __future__ import annotations

import json
import struct
from typing import Any

_HEADER = struct.Struct("!I")


class WireError(Exception):
    """The other side sent something that is no message."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as bytes: four bytes of length, then JSON in ASCII."""
    body = json.dumps(message).encode("ascii")
    return _HEADER.pack(len(body)) + body


class Reader:
    """Puts messages together from pieces, and refuses one that is too long before it is here.

    Args:
        limit: bytes a message may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> dict[str, Any] | None:
        """Takes a piece; the message when it is complete, else ``None``.

        Raises:
            WireError: it is too long, no JSON, or no object.
        """
        self._buffer += data
        if len(self._buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._buffer)
        if size > self._limit:
            raise WireError(f"a message of {size} bytes; at most {self._limit} are taken")
        if len(self._buffer) < _HEADER.size + size:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
        del self._buffer[: _HEADER.size + size]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError(f"not JSON: {error}") from error
        if not isinstance(message, dict):
            raise WireError(f"expected a JSON object, got {type(message).__name__}")
        return message
