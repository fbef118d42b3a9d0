"""The same environment written blocking and async."""

from __future__ import annotations

from typing import Any

import agentrl


class Guess(agentrl.Env):
    """Guess a number; written blocking."""

    max_turns = 4

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.secret = int(self.np_random.integers(10))
        return "Guess a digit.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action.strip() == str(self.secret):
            return "", 1.0, True, False, {"success": True}
        return f"Not {action[:10]!r}; noise {self.np_random.integers(100)}.", -0.1, False, False, {}


class AsyncGuess(agentrl.Env):
    """The same, written async."""

    max_turns = 4

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await super().areset(seed=seed, options=options)
        self.secret = int(self.np_random.integers(10))
        return "Guess a digit.", {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action.strip() == str(self.secret):
            return "", 1.0, True, False, {"success": True}
        return f"Not {action[:10]!r}; noise {self.np_random.integers(100)}.", -0.1, False, False, {}
