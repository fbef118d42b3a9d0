"""The episode loop: one environment, and for each agent in it one conversation and one trajectory.

:func:`play_episode` never raises for what an environment, a tool, a reward or an engine does: the
trajectories' ``stop_reason`` and ``error`` say it. A defect of ours (:class:`~agentrl.errors.LedgerError`),
a wrong configuration and cancellation pass through.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic

import gymnasium

from agentrl.concurrency.backend import Backend
from agentrl.concurrency.clock import Clock, OutOfTime
from agentrl.concurrency.event_loop import attend
from agentrl.concurrency.threads import await_user_code, own_thread
from agentrl.envs.multi_agent import shares
from agentrl.errors import ConfigError, EnvError, InfraError, LedgerError, describe
from agentrl.rewards.number import reward_number
from agentrl.rollout.agent import SOLE_AGENT, Agent, Opening
from agentrl.rollout.conversation import Chat, Client, Dialogue, EpisodeEnd, EpisodeLimits, Turn
from agentrl.rollout.generate_hook import GenerateFunction
from agentrl.tools.formats import get_parser
from agentrl.types import Message, Outcome, SamplingParams, StopReason, Task, Trajectory

_STEP_KEYS = frozenset(
    {"messages", "tools", "stop", "raw_prompt", "trusted_roles", "template_kwargs"}
    | {"stop_reason", "rewards", "success", "tool_calls"}
    | {"agent", "prompts", "agent_rewards"}
    | {"episode_id", "episode_agents"}  # ours: an environment's own would make one episode of several
)
_BUDGETS = frozenset({StopReason.MAX_TOKENS, StopReason.MAX_CONTEXT, StopReason.MAX_TOOL_OUTPUT, StopReason.MAX_TURNS})


async def run_episode(env: gymnasium.Env[Any, Any], task: Task, **options: Any) -> Trajectory:
    """:func:`play_episode` for an environment of one agent, whose trajectory it gives."""
    trajectories = await play_episode(env, task, **options)
    if len(trajectories) != 1:
        names = ", ".join(t.agent for t in trajectories)
        raise ConfigError(f"{type(env).__name__} is played by several agents ({names}): use play_episode")
    return trajectories[0]


async def play_episode(
    env: gymnasium.Env[Any, Any],
    task: Task,
    *,
    client: Client,
    chat: Chat[Client],
    params: SamplingParams,
    limits: EpisodeLimits,
    trajectory_id: str,
    group_id: str,
    generate: GenerateFunction | None = None,
) -> list[Trajectory]:
    """Play ``task`` in ``env`` to its end: one trajectory, or one for each agent that acted.

    Args:
        env: an :class:`agentrl.Env`, or any Gymnasium environment from text to text. It is neither closed
            nor left reset; after an infra error or a timeout it should not be used again. Each step is taken with an
            :class:`~agentrl.tools.formats.Action`: the turn's text, which carries its parse.
        task: seed and options of the reset.
        params: sampling; ``max_new_tokens`` is a further cap on each turn.
        trajectory_id: of the episode. The trajectories of several agents are ``<trajectory_id>:<agent>``, each
            in the group ``<group_id>/<agent>``.
        generate: takes the place of the loop, see :mod:`agentrl.rollout.generate_hook`. It is one agent, whatever
            the environment.

    Raises:
        ConfigError: no parser for the model's call format.
        asyncio.CancelledError: the caller gave up.
    """
    episode = Episode(env, task, client, chat, params, limits, trajectory_id)
    reason, error, retryable = StopReason.DONE, None, True
    try:
        reason = await (episode.play() if generate is None else episode.play_custom(generate))
    except EpisodeEnd as end:
        reason, error, retryable = end.reason, end.error, end.retryable
    except (LedgerError, ConfigError):
        raise
    except InfraError as problem:
        reason, error = StopReason.TOOL_ERROR, describe(problem)
    except Exception as problem:  # an environment may raise anything; it becomes data
        reason, error = StopReason.ENV_ERROR, describe(problem)
    finally:
        episode.clock.close()
    return episode.trajectories(group_id, reason, error, retryable)


def entry_point(env: gymnasium.Env[Any, Any], name: str) -> Callable[..., Awaitable[Any]]:
    """``env.areset`` or ``env.astep``; of an environment without it the blocking one, always in the same thread."""
    coroutine_function = getattr(env, f"a{name}", None)
    if coroutine_function is not None:
        return coroutine_function

    def in_thread(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        return own_thread(getattr(env, "unwrapped", env)).run(getattr(env, name), *args, **kwargs)

    return in_thread


class Episode(Generic[Client]):
    """One episode, as the loop plays it or a custom generate function (:mod:`agentrl.rollout.generate_hook`) does.

    Attributes:
        task: what to attempt.
        env: the environment; :meth:`reset` and :meth:`step` call it within its time limits.
        limits: budgets.
        reward: a generate function sets it, returns it, or lets :meth:`step` add it up.
        rewards: named parts of the reward of a generate function, for the record.
        success: whether the task was solved, as a generate function sees it.
    """

    conversation: Dialogue
    """That of the agent whose turn it is."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        task: Task,
        client: Client,
        chat: Chat[Client],
        params: SamplingParams,
        limits: EpisodeLimits,
        trajectory_id: str,
    ) -> None:
        self.env, self.task, self.limits = env, task, limits
        self._client, self._chat, self._params = client, chat, params
        self._trajectory_id = trajectory_id
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.success: bool | None = None
        self._started = time.monotonic()
        self.clock = Clock()
        self._functions = {name: entry_point(env, name) for name in ("reset", "step")}
        self._rewards: dict[str, float] = {}
        self._success: bool | None = None
        self._info: dict[str, Any] = {}
        self._end: EpisodeEnd | None = None
        self._opening = Opening()  # what the reset says of the first prompt
        self._raw: tuple[list[Message], str] | None = None  # first messages, and the text to send for them
        self._options = {"split": task.split, **task.options}
        call_format = getattr(env, "call_format", None)
        if call_format == "auto":
            self._options["call_format"] = chat.call_format
        self._parser = get_parser(chat.call_format if call_format in (None, "auto") else call_format)
        agent = Agent(SOLE_AGENT, self._conversation(trajectory_id))
        self._agents = {SOLE_AGENT: agent}
        self._several = False
        self._give_turn(agent)

    def _conversation(self, routing_key: str) -> Dialogue:
        return self._chat.conversation(
            client=self._client,
            parser=self._parser,
            params=self._params,
            limits=self.limits,
            routing_key=routing_key,
            name=self.task.task_id,
        )

    def _give_turn(self, agent: Agent) -> None:
        self._acting, self.conversation = agent, agent.conversation

    async def play(self) -> StopReason:
        """Turns until the task, a budget or a failure ends it."""
        observation, info = await self.reset()
        self._admit_agents(info)
        try:
            self._show(observation, info, start=True)
            while True:
                turn = await self.generate()
                if turn.cut_short is not None:
                    raise EpisodeEnd(turn.cut_short)
                observation, _, terminated, truncated, info = await self.step(turn.text)
                if terminated or truncated:
                    return _stop_reason(info.get("stop_reason"), terminated)
                self._show(observation, info)
        except EpisodeEnd as end:
            if self._several and end.reason in _BUDGETS:
                self._forfeit()
            raise

    def _admit_agents(self, info: dict[str, Any]) -> None:
        """Who takes part, as the reset says: one agent, or those that ``info["prompts"]`` names."""
        self._acting.opening = self._opening
        prompts = info.get("prompts")
        if prompts is None or "agent" not in info:  # an environment of one agent may use the word for its own ends
            return
        self._several = True
        waited = self._acting.env_seconds
        self._agents = {
            name: Agent(
                name, self._conversation(f"{self._trajectory_id}:{name}"), Opening.of(prompt, prompt["messages"])
            )
            for name, prompt in prompts.items()
        }
        self._give_turn(self._agents[info["agent"]])
        self._acting.opening = self._opening  # the reset's messages are the whole first prompt
        self._acting.env_seconds = waited

    def _show(self, observation: str, info: dict[str, Any], *, start: bool = False) -> None:
        """Give what is new to the agent whose turn it is; its first time, that opens its conversation.

        Only what the reset said (``start``, or the agent's own opening) is the author's; the rest comes from outside.
        """
        messages = info.get("messages") or [Message(role="user", content=observation)]
        if self._several:
            self._give_turn(self._agents[info["agent"]])
        opening, self._acting.opening = self._acting.opening, None
        if opening is None:
            self.observe(messages)
            return
        try:
            authored = None if start else len(opening.messages)
            self.prompt([*opening.messages, *messages], opening.tools, opening.stop, opening=opening, authored=authored)
        except EpisodeEnd as end:
            if not any(agent.turn_rewards for agent in self._agents.values()):
                raise
            # It holds what other agents wrote: too much of that is a full context, not a task that cannot be.
            self._end = EpisodeEnd(StopReason.MAX_CONTEXT, end.error)
            raise self._end from None

    def _forfeit(self) -> None:
        """A budget of the acting agent ended the episode before the environment could: what that costs, or earns."""
        forfeit = getattr(getattr(self.env, "unwrapped", self.env), "forfeit", None)
        for name, share in shares(self._agents, 0.0, forfeit(self._acting.name) if forfeit else None).items():
            agent = self._agents[name]
            agent.earn(share, acted=agent.conversation.num_turns > len(agent.turn_rewards))

    async def play_custom(self, generate: GenerateFunction) -> StopReason:
        """A custom generate function in the place of :meth:`play`."""
        playing = attend("the custom generate function", generate, self, movable=False)
        try:
            returned = await self.clock.within(self.limits.timeout_s, await_user_code(playing))
        except OutOfTime:
            raise self._out_of_time() from None
        if self._end is not None:  # the function caught what ended its episode
            raise self._end
        last = self.conversation.last_turn
        if last is None:
            raise EnvError("the custom generate function returned without sampling; call ctx.generate()")
        reward = returned if returned is not None else self.reward
        if reward is not None:
            self._acting.turn_rewards = [reward_number(reward, "the reward of the custom generate function")]
        self._record({"rewards": self.rewards, "success": self.success})
        return last.cut_short or StopReason.DONE

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return list(self.conversation.messages)

    def prompt(
        self,
        messages: Sequence[Message] | str,
        tools: list[dict[str, Any]] | None = None,
        stop: Sequence[str] = (),
        *,
        opening: Opening | None = None,
        authored: int | None = None,
    ) -> None:
        """Open the conversation, as the reset (or ``opening``) says; once an episode. See :meth:`Dialogue.prompt`.

        Args:
            messages: what the chat template is to render; or text, which is sent as it is, as are the messages of a
                reset that came with ``info["raw_prompt"]`` (``--no-apply-chat-template``).
            tools: function schemas for the template.
            stop: strings at which a turn ends.
        """
        if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
            raise EnvError(f"stop strings are {stop!r:.80}; a list of text is expected, as in ['</search>']")
        raw = None
        if isinstance(messages, str):
            raw, messages = messages, [Message(role="user", content=messages)]
        elif self._raw is not None and list(messages) == self._raw[0]:
            raw = self._raw[1]
        opening = opening or self._opening
        try:
            self.conversation.prompt(messages, tools, stop, raw=raw, authored=authored, opening=opening)
        except EpisodeEnd as end:
            self._end = end
            raise

    async def generate(self) -> Turn:
        """Sample one turn, within the budgets of turns and wall time; those, or an engine that fails, end it all."""
        try:
            return await self.clock.within(self._check_budgets(), self.conversation.generate())
        except EpisodeEnd as end:
            self._end = end
            raise
        except OutOfTime:
            self._end = self._out_of_time()
            raise self._end from None

    def _out_of_time(self) -> EpisodeEnd:
        """The end of an episode whose wall time is over; the engine's doing where it had most of that time."""
        limit, engine = self.limits.timeout_s, sum(a.conversation.engine_seconds for a in self._agents.values())
        if 2 * engine <= limit:
            return EpisodeEnd(StopReason.TIMEOUT)
        return EpisodeEnd(
            StopReason.ENGINE_TIMEOUT,
            f"{engine:.1f} s of the {limit:g} s of --episode-timeout were spent waiting for the engine: give more "
            "time, or fewer episodes at once (--rollout-concurrency)",
        )

    def observe(self, messages: Sequence[Message]) -> None:
        """Append what the policy is to see next, if another turn may follow it; never trained on."""
        try:
            self._check_budgets()
            self.conversation.observe(messages)
        except EpisodeEnd as end:
            self._end = end
            raise

    def _check_budgets(self) -> float:
        """The seconds that are left."""
        limit = self.limits.max_turns
        if limit is not None and len(self.conversation.turns) >= limit:
            raise EpisodeEnd(StopReason.MAX_TURNS)
        left = self._started + self.limits.timeout_s - time.monotonic()
        if left <= 0:
            raise self._out_of_time()
        return left

    async def reset(self) -> tuple[str, dict[str, Any]]:
        """Reset the environment to the task: ``(observation, info)``."""
        observation, info = await self._call("reset", seed=self.task.seed, options=dict(self._options))
        self._record(info)
        self._opening = Opening.of(info)
        raw = info.get("raw_prompt")
        if raw is not None:
            if not isinstance(raw, str):
                raise EnvError(f"info['raw_prompt'] must be the text to send, got {type(raw).__name__}")
            self._raw = (list(info.get("messages") or [Message(role="user", content=observation)]), raw)
        return observation, info

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Step the environment; reward, calls and success enter the record."""
        acting, before = self._acting, self._acting.env_seconds
        observation, reward, terminated, truncated, info = await self._call("step", action)
        if self.conversation.turns:
            self.conversation.turns[-1]["env_seconds"] = acting.env_seconds - before
        reward = reward_number(reward, f"the reward of {type(self.env).__name__}.step")
        if self._several:
            for name, share in shares(self._agents, reward, info.get("agent_rewards")).items():
                self._agents[name].earn(share, acted=name == acting.name)
        else:
            acting.earn(reward, acted=True)
        self._record(info)
        return observation, reward, terminated, truncated, info

    def trajectories(self, group_id: str, reason: StopReason, error: str | None, retryable: bool) -> list[Trajectory]:
        """The finished record of each agent that acted; that of the one at hand when none did."""
        acted = [agent for agent in self._agents.values() if agent.conversation.num_turns] or [self._acting]
        if self._several:
            names = [agent.name for agent in acted]
            self._info |= {"episode_id": self._trajectory_id, "episode_agents": names}
            # Of an agent that never acted there is no trajectory, but what it earned is a part of the episode.
            self._info["agent_rewards"] = {agent.name: agent.reward for agent in self._agents.values()}
        return [self._trajectory(agent, group_id, reason, error, retryable) for agent in acted]

    def _trajectory(
        self, agent: Agent, group_id: str, reason: StopReason, error: str | None, retryable: bool
    ) -> Trajectory:
        conversation = agent.conversation
        success = self._success
        if success is None and reason.outcome in (Outcome.TRUNCATED, Outcome.POLICY_ERROR):
            success = False
        info = {**self._info, "turns": conversation.turns}
        if reason.outcome is Outcome.INFRA_ERROR:
            info["retryable"] = retryable
        trajectory_id = self._trajectory_id
        if self._several:
            trajectory_id, group_id = f"{trajectory_id}:{agent.name}", f"{group_id}/{agent.name}"
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            task=self.task,
            segments=conversation.segments(),
            messages=conversation.messages,
            reward=agent.reward,
            rewards=self._rewards,
            turn_rewards=agent.turn_rewards,
            success=success,
            stop_reason=reason,
            error=error,
            num_turns=conversation.num_turns,
            tool_calls=agent.tool_calls,
            agent=agent.name,
            info=info,
            timings={
                "total": time.monotonic() - self._started,
                "engine": conversation.engine_seconds,
                "env": agent.env_seconds,
                "encode": conversation.encode_seconds,
            },
        )

    def _record(self, info: dict[str, Any]) -> None:
        """What a reset or step said about rewards, calls and success, and what else it said."""
        for key, value in info.items():
            if key not in _STEP_KEYS:
                self._info[key] = value
        if calls := info.get("tool_calls"):
            last = self.conversation.last_turn
            said = last.text.parsed.tool_calls if last is not None else []
            for number, call in enumerate(calls):
                call = {"turn": len(self.conversation.turns), **call}
                if number < len(said) and call.get("arguments") == said[number].arguments:
                    call["arguments"] = said[number].arguments  # the message's own, held once
                self._acting.tool_calls.append(call)
        for name, value in (info.get("rewards") or {}).items():
            self._rewards[name] = self._rewards.get(name, 0.0) + reward_number(value, f"the reward {name!r}")
        if info.get("success") is not None:
            self._success = bool(info["success"])

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """``env.areset``/``env.astep`` (or the blocking one in a thread), within the time that is left.
        Raises EpisodeEnd: TIMEOUT when the episode's time ran out in a step, ENV_ERROR when the call itself hangs."""
        started = time.monotonic()
        left = self._started + self.limits.timeout_s - started
        seconds = min(self.limits.step_timeout_s, left)
        try:
            return await self.clock.within(seconds, await_user_code(self._functions[name](*args, **kwargs)))
        except OutOfTime:
            if away := Backend.what_is_away():
                self._end = EpisodeEnd(StopReason.TOOL_ERROR, away)
            elif name == "step" and seconds == left:
                self._end = self._out_of_time()
            else:
                text = f"{type(self.env).__name__}.{name} did not return within {seconds:.1f} s"
                if seconds < left:
                    text += " (--episode-step-timeout)"
                self._end = EpisodeEnd(StopReason.ENV_ERROR, text)
            raise self._end from None
        finally:
            self._acting.env_seconds += time.monotonic() - started


def _stop_reason(given: Any, terminated: bool) -> StopReason:
    try:
        reason = StopReason(str(given)) if given is not None else None
    except ValueError:
        reason = None
    if reason is None or (terminated and reason.outcome is Outcome.TRUNCATED):
        return StopReason.DONE if terminated else StopReason.ENV_TRUNCATED
    return reason
