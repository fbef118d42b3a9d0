"""One episode before any engine starts: what is wrong in an author's code is said within seconds, in the author's line.

It goes through the real episode loop, with an environment of its own and a policy that says something plain. No tool is
called, no task of the account is used, and rewards that are models or judges are left out: a model is not
loaded twice, and a judge costs money.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from agentrl.concurrency.threads import run_blocking
from agentrl.errors import EnvError, describe
from agentrl.rewards.combine import REHEARSING
from agentrl.rollout.conversation import Dialogue, EpisodeLimits, Turn
from agentrl.rollout.episode import play_episode
from agentrl.rollout.generate_hook import load_generate_function
from agentrl.tools.formats import Action
from agentrl.types import Message, SamplingParams, StopReason, Task

log = logging.getLogger(__name__)

ANSWER = "I do not know."
MAX_TURNS = 3
SECONDS = 30.0
"""Time of one call of the environment; slower ones are none of our business here."""


def rehearse(make_env: Callable[[], Any], tasks: Sequence[Task], generate: str | None, what: str) -> None:
    """Play the first of ``tasks``; where that fails, the next: a failure of the moment ends nothing.

    Args:
        make_env: makes the environment.
        tasks: which tasks to try; empty: one drawn from the environment's first split.
        generate: name of a custom generate function.
        what: names the environment to a person.

    Raises:
        EnvError: each ended with an exception of the author's code, which is quoted with its place.
        ConfigError: the environment or the generate function cannot be used.
    """
    asyncio.run(_rehearse(make_env, tasks, generate, what))


async def _rehearse(make_env: Callable[[], Any], tasks: Sequence[Task], generate: str | None, what: str) -> None:
    function = load_generate_function(generate)
    token = REHEARSING.set(True)
    env = await run_blocking(make_env)
    try:
        failed = ""
        for task in tasks or [Task(what, seed=seed, split=_first_split(env)) for seed in range(2)]:
            began = time.monotonic()
            (trajectory, *_) = await play_episode(
                env, task, client=None, chat=_Chat(), params=SamplingParams(), generate=function,
                limits=EpisodeLimits(max_turns=MAX_TURNS, timeout_s=4 * SECONDS, step_timeout_s=SECONDS),
                trajectory_id="rehearsal", group_id="rehearsal",
            )  # fmt: skip
            if trajectory.stop_reason is not StopReason.ENV_ERROR:
                if trajectory.stop_reason is StopReason.TOOL_ERROR:
                    log.warning("%s: one episode was tried out and failed: %s", what, trajectory.error)
                return
            if time.monotonic() - began >= SECONDS:
                log.warning("%s: one episode was tried out, but %s", what, trajectory.error)
                return
            failed = failed or f"{trajectory.error}"
        raise EnvError(f"{what}: an episode was tried out before anything starts, and failed: {failed}")
    finally:
        REHEARSING.reset(token)
        await _close(env)


def _first_split(env: gymnasium.Env[Any, Any]) -> str:
    splits = getattr(env, "splits", None) or ("train",)
    count = getattr(env, "num_tasks", lambda split: None)
    return next((split for split in splits if count(split) != 0), splits[0])


async def _close(env: gymnasium.Env[Any, Any]) -> None:
    try:
        async with asyncio.timeout(SECONDS):
            await (env.aclose() if hasattr(env, "aclose") else run_blocking(env.close))
    except Exception as error:  # the author's code
        log.warning("closing %s: %s", type(env).__name__, describe(error))


class _Chat:
    """Stands where a chat template stands, and knows no tokens."""

    call_format = "hermes"

    def conversation(self, *, client: None, **parts: Any) -> _Conversation:
        return _Conversation(**parts)


class _Conversation(Dialogue):
    """A conversation with a model that says :data:`ANSWER`."""

    def prompt(self, messages: Sequence[Message], *_: Any, **__: Any) -> None:
        self.messages = list(messages)

    async def generate(self) -> Turn:
        text = f"<answer>{ANSWER}</answer>" if "answer" in getattr(self._parser, "names", ()) else ANSWER
        action = Action(text, self._parser)
        self.last_turn = Turn(action, action.parsed.message(), "stop", np.arange(1, 5, dtype=np.int32))
        self.turns.append({"finish_reason": "stop"})
        self.messages = [*self.messages, self.last_turn.message]
        return self.last_turn

    def observe(self, messages: Sequence[Message]) -> None:
        self.messages = [*self.messages, *messages]
