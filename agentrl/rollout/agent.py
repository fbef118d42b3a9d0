"""One agent's part of an episode. An ordinary episode has one; one of a ``MultiAgentEnv`` several."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from agentrl.rollout.conversation import Dialogue, Opening

SOLE_AGENT = "agent"
"""Name of the only agent of an ordinary episode."""


@dataclass
class Agent:
    """An agent's conversation, what it did and what it earned."""

    name: str
    conversation: Dialogue
    opening: Opening | None = None  # until the conversation is open
    turn_rewards: list[float] = field(default_factory=list)  # one entry a turn of this agent
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    env_seconds: float = 0.0
    _early: float = 0.0  # earned before the first turn

    @property
    def reward(self) -> float:
        """All that it earned."""
        return math.fsum((*self.turn_rewards, self._early))

    def earn(self, reward: float, *, acted: bool) -> None:
        """Add to the agent's last turn; ``acted``: the step was its own, so that turn is a new one.

        What it earns while others act belongs to the turn it took before that, or to its first one.
        """
        if acted:
            self.turn_rewards.append(reward + self._early)
            self._early = 0.0
        elif self.turn_rewards:
            self.turn_rewards[-1] += reward
        else:
            self._early += reward
