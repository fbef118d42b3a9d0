"""``MultiAgentEnv``: several agents take turns in one episode, each with a conversation of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import gymnasium

from agentrl.envs.core import Env
from agentrl.errors import ConfigError, EnvError
from agentrl.rewards.number import reward_number
from agentrl.types import Message


class MultiAgentEnv(Env):
    """Base class of environments in which several agents, all played by the policy, take turns.

    Subclasses set ``agents`` and define ``reset`` and ``step`` (or the async ones) as for :class:`Env`, with more
    in ``info``:

    - after a reset: ``prompts``, for each agent how its conversation opens: the text of a system message, or
      ``{"messages": [...], "tools": [...], "stop": [...]}``. ``agent`` is who acts first (default: the first of
      ``agents``), and the observation is the first thing it is told.
    - after a step: ``agent`` is who acts next (default: the next of ``agents``, the first after the last). The
      observation, or ``messages``, is what *that* agent has not seen yet. ``agent_rewards`` is what each agent
      earns; without it everyone earns the step's reward.

    :attr:`acting` is whose action a step gets. ``max_turns`` counts the turns of all. The episode leaves one
    trajectory for each agent, with that agent's tokens and rewards; ``success`` is the episode's.

    Example:
        >>> class Telephone(MultiAgentEnv):
        ...     agents = ("teller", "writer")
        ...     def reset(self, *, seed=None, options=None):
        ...         prompts = {"teller": "Describe the word, never say it.", "writer": "Which word is it?"}
        ...         return "The word is rain.", {"prompts": prompts}
        ...     def step(self, action):
        ...         if self.acting == "teller":
        ...             return action, 0.0, False, False, {}
        ...         solved = "rain" in action
        ...         return "", float(solved), True, False, {"success": solved}
        >>> env = Telephone()
        >>> _, info = env.reset(seed=0)
        >>> info["agent"], [message["content"] for message in info["messages"]]
        ('teller', ['Describe the word, never say it.', 'The word is rain.'])
        >>> env.step("It falls from clouds.")[4]
        {'messages': [{'role': 'user', 'content': 'It falls from clouds.'}], 'agent': 'writer'}
    """

    agents: ClassVar[tuple[str, ...]] = ()
    """Names of the agents. Trajectories, groups and metrics carry them: letters, digits, ``_`` and ``-``."""

    acting: str = ""
    """Who acts in the next step."""

    def forfeit(self, agent: str) -> dict[str, float]:
        """Rewards when ``agent`` uses up one of its budgets, so that the episode ends in the middle of its turn.

        An agent that is about to lose must not gain by rambling: in games with opposed interests, answer with
        what losing costs. By default nobody gets anything.
        """
        return {}

    def check_settings(self) -> None:
        super().check_settings()
        names = self.agents
        good = all(isinstance(n, str) and n.replace("_", "").replace("-", "").isalnum() for n in names)
        if not names or not good or len(set(names)) < len(names):
            raise ConfigError(
                f"{type(self).__name__}.agents is {names!r}; distinct names are expected, of letters, digits, '_' and "
                "'-'."
            )

    def render(self) -> str:
        """The conversations so far as one text, each turn under its agent's name."""
        return "\n".join(f"{m.get('name') or m['role']}: {m.get('content', '')}" for m in self._transcript)

    # -- around the author's code ----------------------------------------------------------------

    def _after_reset(self, result: Any) -> tuple[str, dict[str, Any]]:
        observation, info = super()._after_reset(result)
        info["prompts"] = self._prompts(info.get("prompts"))
        self.acting = self._agent(info.setdefault("agent", self.agents[0]), "reset")
        opening = info["prompts"][self.acting]
        told = [m for m in info["messages"] if m.get("content") or m.get("tool_calls")]
        # Whoever knows of one agent only finds here what it would find anywhere else.
        info["messages"] = [*opening["messages"], *told]
        info |= {name: opening[name] for name in ("tools", "stop") if opening.get(name)}
        self._transcript = list(info["messages"])
        return observation, info

    def _before_step(self, action: str) -> None:
        super()._before_step(action)
        self._transcript[-1]["name"] = self.acting

    def _after_step(self, result: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super()._after_step(result)
        rewards = info.get("agent_rewards")
        if rewards is not None:
            where = f"{type(self).__name__}.step"
            if not isinstance(rewards, Mapping):
                raise EnvError(f"{where}: info['agent_rewards'] must be a dict, got {rewards!r:.80}.")
            info["agent_rewards"] = {
                self._agent(name, "step"): reward_number(value, f"the reward of {where} for {name!r}")
                for name, value in rewards.items()
            }
        if not terminated and not truncated:
            following = self.agents[(self.agents.index(self.acting) + 1) % len(self.agents)]
            self.acting = self._agent(info.setdefault("agent", following), "step")
        return observation, reward, terminated, truncated, info

    def _prompts(self, given: Any) -> dict[str, dict[str, Any]]:
        where = f"{type(self).__name__}.reset: info['prompts']"
        if not isinstance(given, Mapping) or set(given) != set(self.agents):
            found = sorted(given) if isinstance(given, Mapping) else given
            raise EnvError(f"{where} must hold a prompt for each of {list(self.agents)}, got {found!r:.120}.")
        return {name: _prompt(given[name], f"{where}[{name!r}]") for name in self.agents}

    def _agent(self, name: Any, where: str) -> str:
        if name not in self.agents:
            raise EnvError(
                f"{type(self).__name__}.{where} names the agent {name!r}; the agents are {', '.join(self.agents)}."
            )
        return name


def acting_agent(env: gymnasium.Env[Any, Any]) -> str:
    """Whose turn it is in ``env``, in wrappers or not; empty where there is only one."""
    inside = env.unwrapped
    return inside.acting if isinstance(inside, MultiAgentEnv) else ""


def agents_of(env: gymnasium.Env[Any, Any]) -> tuple[str, ...]:
    """Names of the agents that take part; none where one agent plays alone."""
    inside = env.unwrapped
    return tuple(inside.agents) if isinstance(inside, MultiAgentEnv) else ()


def shares(agents: Iterable[str], reward: float, given: Mapping[str, Any] | None) -> dict[str, float]:
    """What each agent gets of a step: its part of ``info["agent_rewards"]``; without that, the step's reward each.
    Raises EnvError: rewards for agents that take no part, or one that is not a finite number."""
    if given is None:
        return dict.fromkeys(agents, reward)
    names = list(agents)
    if unknown := sorted(set(given) - set(names)):
        raise EnvError(f"agent_rewards names {unknown}, which take no part; the agents are {sorted(names)}")
    return {name: reward_number(given.get(name, 0.0), f"the reward of {name!r}") for name in names}


def _prompt(given: Any, where: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"messages": [Message(role="system", content=given)]}
    if not isinstance(given, Mapping) or not isinstance(given.get("messages"), list):
        raise EnvError(f"{where} must be text or a dict with a list 'messages', got {given!r:.120}.")
    return dict(given)
