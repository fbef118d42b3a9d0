"""One agent's part of an episode. An ordinary episode has one; one of a ``MultiAgentEnv`` several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.template import checked_variables
from agentrl.errors import ConfigError, EnvError
from agentrl.rollout.conversation import AUTHOR_ROLES, Dialogue
from agentrl.types import Message

SOLE_AGENT = "agent"
"""Name of the only agent of an ordinary episode."""


@dataclass(frozen=True)
class Opening:
    """How a conversation opens; ``messages`` stand before what is said to the agent first."""

    messages: Sequence[Message] = ()
    tools: list[dict[str, Any]] | None = None
    stop: Sequence[str] = ()
    trusted_roles: Sequence[str] = AUTHOR_ROLES
    variables: Mapping[str, Any] | None = None  # of the chat template

    @classmethod
    def of(cls, info: Mapping[str, Any], messages: Sequence[Message] = ()) -> Opening:
        """What a reset's ``info``, or an agent's part of it, says.

        Raises:
            EnvError: ``trusted_roles`` or ``template_kwargs`` are not of the form that is expected.
        """
        roles, variables = info.get("trusted_roles", AUTHOR_ROLES), info.get("template_kwargs")
        if isinstance(roles, str) or not all(isinstance(role, str) for role in roles):
            raise EnvError(f"info['trusted_roles'] is {roles!r:.80}; a list of roles is expected, as in ['system']")
        if variables is not None:
            try:
                checked_variables(variables, "info['template_kwargs']")
            except ConfigError as error:
                raise EnvError(str(error)) from None
        return cls(messages, info.get("tools") or None, info.get("stop") or (), roles, variables)


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
