"""How much an event loop does before it looks at its timers and sockets again."""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """Lets so many pieces of work go on in one pass of the event loop; the rest waits for the next, in order.

    asyncio looks at timers and sockets once a pass, and a pass runs all that is ready. With thousands of episodes in
    flight that can be seconds: no timeout then ends in time, and a process that works looks as if it hung."""

    def __init__(self, pieces: int = 16) -> None:
        self._pieces = self._left = pieces
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Waits until the pass at hand has room for a piece of work; that goes on up to its next ``await``."""
        loop = asyncio.get_running_loop()
        if self._left == self._pieces:
            loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """A new pass has begun."""
        self._left = self._pieces
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled meanwhile
                turn.set_result(None)
                self._left -= 1
        if self._left < self._pieces:
            asyncio.get_running_loop().call_soon(self._next)
