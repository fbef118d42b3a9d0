"""The episode loop: one environment, one conversation, one trajectory.

:func:`run_episode` never raises for what an environment, a tool, a reward or an engine does: the
trajectory's ``stop_reason`` and ``error`` say it. A defect of ours (:class:`~agentrl.errors.LedgerError`),
a wrong configuration and cancellation pass through.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentrl.errors import ConfigError, EnvError, InfraError, LedgerError
from agentrl.rollout.chat import ChatTemplate
from agentrl.rollout.client import PolicyClient
from agentrl.rollout.conversation import Conversation, EpisodeEnd, EpisodeLimits, Turn
from agentrl.rollout.generate_hook import GenerateContext, GenerateFunction
from agentrl.tools.parsers import get_parser
from agentrl.tools.threads import run_blocking
from agentrl.types import Message, Outcome, SamplingParams, StopReason, Task, Trajectory

__all__ = ["Episode", "EpisodeLimits", "run_episode"]

_STEP_KEYS = frozenset({"messages", "tools", "stop", "raw_prompt", "stop_reason", "rewards", "success", "tool_calls"})


async def run_episode(
    env: Any,
    task: Task,
    *,
    client: PolicyClient,
    chat: ChatTemplate,
    params: SamplingParams,
    limits: EpisodeLimits,
    trajectory_id: str,
    group_id: str,
    generate: GenerateFunction | None = None,
) -> Trajectory:
    """Play ``task`` in ``env`` to its end.

    Args:
        env: an :class:`agentrl.Env`, or any Gymnasium environment from text to text. It is neither closed
            nor left reset; after an infra error or a timeout it should not be used again.
        task: seed and options of the reset.
        params: sampling; ``max_new_tokens`` is a further cap on each turn.
        generate: takes the place of the loop, see :mod:`agentrl.rollout.generate_hook`.

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
    return episode.trajectory(group_id, reason, error, retryable)


class Episode:
    """State of one episode; what the loop and custom generate functions share."""

    def __init__(
        self,
        env: Any,
        task: Task,
        client: PolicyClient,
        chat: ChatTemplate,
        params: SamplingParams,
        limits: EpisodeLimits,
        trajectory_id: str,
    ) -> None:
        self.env, self.task, self.limits = env, task, limits
        self._trajectory_id = trajectory_id
        self._started = time.monotonic()
        self._env_seconds = 0.0
        self._rewards: dict[str, float] = {}
        self._turn_rewards: list[float] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._success: bool | None = None
        self._info: dict[str, Any] = {}
        self._end: EpisodeEnd | None = None
        self._raw: tuple[list[Message], str] | None = None  # first messages, and the text to send for them
        call_format = getattr(env, "call_format", "auto")
        if call_format == "auto":
            call_format = chat.call_format
            if hasattr(env, "call_format"):
                env.call_format = call_format
        self.conversation = Conversation(
            client=client,
            chat=chat,
            parser=get_parser(call_format),
            params=params,
            limits=limits,
            routing_key=trajectory_id,
            name=task.task_id,
        )

    async def play(self) -> StopReason:
        """Turns until the task, a budget or a failure ends it."""
        observation, info = await self.reset()
        messages = info.get("messages") or [Message(role="user", content=observation)]
        self.prompt(messages, info.get("tools") or None, tuple(info.get("stop") or ()))
        while True:
            turn = await self.generate()
            if turn.cut_short is not None:
                return turn.cut_short
            observation, _, terminated, truncated, info = await self.step(turn.text)
            if terminated or truncated:
                return _stop_reason(info.get("stop_reason"), terminated)
            self.observe(info.get("messages") or [Message(role="user", content=observation)])

    async def play_custom(self, generate: GenerateFunction) -> StopReason:
        """A custom generate function in the place of :meth:`play`."""
        context = GenerateContext(self)
        clock = asyncio.timeout(self.limits.timeout_s)
        try:
            async with clock:
                returned = await _contained(generate(context))
        except TimeoutError:
            if clock.expired():
                raise EpisodeEnd(StopReason.TIMEOUT) from None
            raise
        if self._end is not None:  # the function caught what ended its episode
            raise self._end
        last = self.conversation.last_turn
        if last is None:
            raise EnvError("the custom generate function returned without sampling; call ctx.generate()")
        reward = returned if returned is not None else context.reward
        if reward is not None:
            self._turn_rewards = [checked_reward(reward)]
        self._keep({"rewards": context.rewards, "success": context.success})
        return last.cut_short or StopReason.DONE

    def prompt(
        self, messages: Sequence[Message] | str, tools: list[dict[str, Any]] | None, stop: Sequence[str]
    ) -> None:
        """Open the conversation.

        Text is sent as it is, without the chat template; so are the messages of a reset that came with
        ``info["raw_prompt"]`` (``--no-apply-chat-template``).
        """
        raw = None
        if isinstance(messages, str):
            raw, messages = messages, [Message(role="user", content=messages)]
        elif self._raw is not None and list(messages) == self._raw[0]:
            raw = self._raw[1]
        try:
            self.conversation.prompt(messages, tools, stop, raw=raw)
        except EpisodeEnd as end:
            self._end = end
            raise

    async def generate(self) -> Turn:
        """Sample one turn, within the budgets of turns and wall time."""
        try:
            self._check_budgets()
            return await self.conversation.generate()
        except EpisodeEnd as end:
            self._end = end
            raise

    def observe(self, messages: Sequence[Message]) -> None:
        """Append an observation, if another turn may follow it."""
        try:
            self._check_budgets()
            self.conversation.observe(messages)
        except EpisodeEnd as end:
            self._end = end
            raise

    def _check_budgets(self) -> None:
        limit = self.limits.max_turns
        if limit is not None and self.conversation.num_turns >= limit:
            raise EpisodeEnd(StopReason.MAX_TURNS)
        if time.monotonic() - self._started >= self.limits.timeout_s:
            raise EpisodeEnd(StopReason.TIMEOUT)

    async def reset(self) -> tuple[str, dict[str, Any]]:
        """Reset the environment to the task."""
        options = {"split": self.task.split, **self.task.options}
        observation, info = await self._call("reset", seed=self.task.seed, options=options)
        self._keep(info)
        raw = info.get("raw_prompt")
        if raw is not None:
            if not isinstance(raw, str):
                raise EnvError(f"info['raw_prompt'] must be the text to send, got {type(raw).__name__}")
            self._raw = (list(info.get("messages") or [Message(role="user", content=observation)]), raw)
        return observation, info

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Step the environment and keep what it said."""
        before = self._env_seconds
        observation, reward, terminated, truncated, info = await self._call("step", action)
        if self.conversation.turns:
            self.conversation.turns[-1]["env_seconds"] = self._env_seconds - before
        reward = checked_reward(reward)
        self._turn_rewards.append(reward)
        self._keep(info)
        return observation, reward, terminated, truncated, info

    def trajectory(self, group_id: str, reason: StopReason, error: str | None, retryable: bool) -> Trajectory:
        """The finished record."""
        conversation = self.conversation
        success = self._success
        if success is None and reason.outcome in (Outcome.TRUNCATED, Outcome.POLICY_ERROR):
            success = False
        info = {**self._info, "turns": conversation.turns}
        if reason.outcome is Outcome.INFRA_ERROR:
            info["retryable"] = retryable
        return Trajectory(
            trajectory_id=self._trajectory_id,
            group_id=group_id,
            task=self.task,
            segments=conversation.segments(),
            messages=conversation.messages,
            reward=math.fsum(self._turn_rewards),
            rewards=self._rewards,
            turn_rewards=self._turn_rewards,
            success=success,
            stop_reason=reason,
            error=error,
            num_turns=conversation.num_turns,
            tool_calls=self._tool_calls,
            info=info,
            timings={
                "total": time.monotonic() - self._started,
                "engine": conversation.engine_seconds,
                "env": self._env_seconds,
                "encode": conversation.encode_seconds,
            },
        )

    def _keep(self, info: dict[str, Any]) -> None:
        """What a reset or step said about rewards, calls and success."""
        turn = self.conversation.num_turns
        self._tool_calls += [{"turn": turn, **call} for call in info.get("tool_calls") or ()]
        for name, value in (info.get("rewards") or {}).items():
            self._rewards[name] = self._rewards.get(name, 0.0) + checked_reward(value, f"reward {name!r}")
        if info.get("success") is not None:
            self._success = bool(info["success"])
        self._info.update((k, v) for k, v in info.items() if k not in _STEP_KEYS)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """``env.areset``/``env.astep`` (or the blocking one in a thread), within the time that is left.

        Raises:
            EpisodeEnd: TIMEOUT when the episode's time ran out in a step, ENV_ERROR when the call itself hangs.
        """
        left = self._started + self.limits.timeout_s - time.monotonic()
        seconds = min(self.limits.step_timeout_s, left)
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(seconds, 0.001)) as clock:
                return await _contained(_entry_point(self.env, name)(*args, **kwargs))
        except TimeoutError:
            if not clock.expired():
                raise  # the environment's own
            if name == "step" and seconds == left:
                self._end = EpisodeEnd(StopReason.TIMEOUT)
            else:
                text = f"{type(self.env).__name__}.{name} did not return within {seconds:.1f} s"
                self._end = EpisodeEnd(StopReason.ENV_ERROR, text)
            raise self._end from None
        finally:
            self._env_seconds += time.monotonic() - started


def checked_reward(value: Any, what: str = "reward") -> float:
    """``value`` as a float.

    Raises:
        ValueError: it is not a finite number.
    """
    if not isinstance(value, str | bytes) and value is not None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError(f"{what} is {value!r} ({type(value).__name__}); a finite number is expected")


def describe(error: BaseException, frames: int = 3) -> str:
    """``Type: text (file:line in function < ...)``, innermost frame first, file names without folders."""
    text = f"{type(error).__name__}: {error}"
    stack = traceback.extract_tb(error.__traceback__)[-frames:]
    if not stack:
        return text
    where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} in {f.name}" for f in reversed(stack))
    return f"{text} ({where})"


def _entry_point(env: Any, name: str) -> Callable[..., Awaitable[Any]]:
    coroutine_function = getattr(env, f"a{name}", None)
    if coroutine_function is not None:
        return coroutine_function

    def in_thread(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        return run_blocking(getattr(env, name), *args, **kwargs)

    return in_thread


async def _contained(call: Awaitable[Any]) -> Any:
    """``call``, with the two ways in which user code could take the whole loop down made ordinary."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"the environment called sys.exit({error.code!r})") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the environment cancelled its own work") from None


def _stop_reason(given: Any, terminated: bool) -> StopReason:
    try:
        reason = StopReason(str(given)) if given is not None else None
    except ValueError:
        reason = None
    if reason is None or (terminated and reason.outcome is Outcome.TRUNCATED):
        return StopReason.DONE if terminated else StopReason.ENV_TRUNCATED
    return reason
