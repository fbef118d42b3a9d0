"""Custom generate functions: the episode loop to oneself, the ledger still in charge.

``--custom-generate-function-path module:function`` (or ``path/to/file.py:function``) names
``async def generate(ctx: GenerateContext) -> float | None``. It drives the conversation as it likes; masks,
log-probabilities, versions, budgets and the reasons for the end are kept for it.

Example, single turn with a reward of one's own::

    async def generate(ctx):
        ctx.prompt([{"role": "user", "content": "Say a prime number."}])
        turn = await ctx.generate()
        return float(turn.text.strip() in {"2", "3", "5", "7"})

Example, the environment's own turns with a reminder before each::

    async def generate(ctx):
        observation, info = await ctx.reset()
        ctx.prompt(info["messages"], info.get("tools"), info.get("stop") or ())
        while True:
            turn = await ctx.generate()
            if turn.cut_short:  # a budget ended the turn: there is no whole action to step with
                return
            observation, reward, terminated, truncated, info = await ctx.step(turn.text)
            if terminated or truncated:
                return
            ctx.observe([*info["messages"], {"role": "user", "content": "Be brief."}])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.loading import load_object
from agentrl.rewards.signature import written_for_slime
from agentrl.rollout.conversation import EpisodeLimits, Turn
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from agentrl.rollout.episode import Episode

GenerateFunction = Callable[["GenerateContext"], Coroutine[Any, Any, float | None]]


class GenerateContext:
    """What a custom generate function gets.

    Attributes:
        task: what to attempt.
        env: the environment; :meth:`reset` and :meth:`step` call it within its time limits.
        reward: set it, return it, or let :meth:`step` add it up.
        rewards: named parts of the reward, for the record.
        success: whether the task was solved, for evaluation.
    """

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.success: bool | None = None

    @property
    def task(self) -> Task:
        return self._episode.task

    @property
    def env(self) -> Any:
        return self._episode.env

    @property
    def limits(self) -> EpisodeLimits:
        return self._episode.limits

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return list(self._episode.conversation.messages)

    async def reset(self) -> tuple[str, dict[str, Any]]:
        """Reset the environment to the task: ``(observation, info)``."""
        return await self._episode.reset()

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Step the environment; reward, calls and success enter the record."""
        return await self._episode.step(action)

    def prompt(
        self, messages: Sequence[Message] | str, tools: list[dict[str, Any]] | None = None, stop: Sequence[str] = ()
    ) -> None:
        """Open the conversation; once an episode.

        Args:
            messages: what the chat template is to render; or text, which is sent as it is. The first messages
                of a reset with ``info["raw_prompt"]`` (``--no-apply-chat-template``) are sent as that text.
            tools: function schemas for the template.
            stop: strings at which a turn ends.
        """
        self._episode.prompt(messages, tools, stop)

    async def generate(self) -> Turn:
        """Sample one turn. Ends the episode when a budget is used up or no engine answers."""
        return await self._episode.generate()

    def observe(self, messages: Sequence[Message]) -> None:
        """Append what the policy is to see next; never trained on."""
        self._episode.observe(messages)


def load_generate_function(spec: str | GenerateFunction | None) -> GenerateFunction | None:
    """The function that ``spec`` names; None for none.

    Raises:
        ConfigError: not found, or not ``async def`` of one argument.
    """
    if spec is None:
        return None
    function = load_object(spec, "--custom-generate-function-path") if isinstance(spec, str) else spec
    coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object with an async __call__ will do
    )
    if not coroutine:
        raise ConfigError(
            f"--custom-generate-function-path {spec!r} is {type(function).__name__}; "
            f"expected `async def generate(ctx)`, see agentrl.rollout.generate_hook"
        )
    if written_for_slime(function):
        raise ConfigError(
            f"--custom-generate-function-path {spec!r} takes (args, sample, ...), as for slime. Here it is "
            "`async def generate(ctx)`: await ctx.reset() and ctx.generate(), return the reward; the example in "
            "agentrl.rollout.generate_hook is one to begin from"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"--custom-generate-function-path {spec!r} is called with one argument, `async def generate(ctx)`: {error}"
        ) from None
    return function
