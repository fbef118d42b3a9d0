"""Custom generate functions: the episode loop to oneself, the ledger still in charge.

``--custom-generate-function-path module:function`` (or ``path/to/file.py:function``) names
``async def generate(ctx) -> float | None``, which gets the :class:`~agentrl.rollout.episode.Episode`. It drives the
conversation as it likes; masks, log-probabilities, versions, budgets and the reasons for the end are kept for it.

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
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.loading import load_object
from agentrl.rewards.signature import written_for_slime

if TYPE_CHECKING:
    from agentrl.rollout.episode import Episode as GenerateContext

GenerateFunction = Callable[["GenerateContext"], Coroutine[Any, Any, float | None]]


def load_generate_function(spec: str | GenerateFunction | None) -> GenerateFunction | None:
    """The function that ``spec`` names; None for none.
    Raises ConfigError: not found, or not ``async def`` of one argument."""
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
