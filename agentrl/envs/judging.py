"""Where the reward of a ``ToolEnv`` comes from, and whether there is one at all."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.rewards import RewardSet
from agentrl.rewards.combine import check_signatures
from agentrl.tools.base import FunctionTool

if TYPE_CHECKING:
    from agentrl.envs.tool_env import ToolEnv

_PLAIN = (str, bytes, int, float, bool, type(None), list, tuple, dict, set)
"""What a tool may return that carries no reward."""
_ROUNDING = 1e-9
"""By so much a sum of parts may miss the reward of a success: 0.7 + 0.2 + 0.1 is less than 1 in binary."""


def reward_of(env: ToolEnv, which: str = "reward") -> Any:
    """The ``reward`` or ``turn_reward`` as its author wrote it.

    A method is bound to ``env``, a plain function stays as it is.
    """
    if which in vars(env):
        return vars(env)[which]
    owner = next(cls for cls in type(env).__mro__ if which in vars(cls))
    value = vars(owner)[which]
    if inspect.isfunction(value):
        return value.__get__(env) if _is_method(value, owner) else value
    return getattr(env, which) if hasattr(value, "__get__") else value  # static and class methods


def _is_method(function: types.FunctionType, owner: type) -> bool:
    """Whether ``function`` was defined in the body of ``owner``, not merely put there."""
    first = next(iter(inspect.signature(function).parameters), "")
    place, _, name = function.__qualname__.rpartition(".")
    defined_there = (function.__module__, place) == (owner.__module__, owner.__qualname__) and name != "<lambda>"
    return first == "self" or (defined_there and first != "text")


def check_reward(env: ToolEnv) -> None:
    """Refuses an environment in which nothing can ever earn a reward.

    Raises:
        ConfigError: No reward, and every tool is declared to return plain values.
    """
    for reward in (reward_of(env), reward_of(env, "turn_reward")):
        if reward is not None and not (isinstance(reward, (list, tuple)) and not reward):
            return
    if env.invalid_call_reward or env.judges_itself() or any(map(_may_reward, env.listed_tools())):
        return
    name = type(env).__name__
    raise ConfigError(
        f"{name} has no reward, so every episode would be worth 0. Define `def reward(self, text, answer)` in it, set "
        "`reward` to a function or a name (exact_match, f1, math), define `turn_reward`, or let a tool return "
        "`agentrl.ToolResult(text, reward=...)` and declare that it does: `-> agentrl.ToolResult`."
    )


def check_reward_signatures(env: ToolEnv) -> None:
    """Refuses reward functions that cannot be called as they will be.

    Raises:
        ConfigError: One cannot; the text says how rewards are called.
    """
    for which in ("reward", "turn_reward"):
        check_signatures(reward_of(env, which))


def _may_reward(tool: Any) -> bool:
    """Whether a tool could return a :class:`ToolResult`; only a declared plain type says that it does not."""
    if isinstance(tool, FunctionTool):
        function = tool.function
    elif inspect.isfunction(tool) or inspect.ismethod(tool):
        function = tool
    else:
        function = (tool if inspect.isclass(tool) else type(tool)).__call__
    try:
        hint = typing.get_type_hints(function).get("return", Any)
    except Exception:  # a name that is not defined here: nothing is known
        return True
    return not _is_plain(hint)


def _is_plain(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_plain, typing.get_args(hint)))
    return origin is typing.Literal or (origin or hint) in _PLAIN


def is_success(env: ToolEnv, final: Mapping[str, float], total: float) -> bool:
    """Whether an episode that came to its end is a success.

    Args:
        final: parts of the final reward; empty where the environment has none.
        total: all that the episode earned, which is judged then.
    """
    judged = math.fsum(final.values()) if final else total
    return judged >= env.success_reward - _ROUNDING


async def judge_again(
    env: ToolEnv, turns: Sequence[str], calls: Sequence[Sequence[Mapping[str, Any]]], *, finished: bool
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """What ``turn_reward`` and ``reward`` give for turns that were taken before. No tool is called.

    Args:
        env: after a reset to the task of these turns.
        turns: what the model wrote.
        calls: for each turn, the records of its calls (``info["tool_calls"]``).
        finished: whether the last turn ended the episode, so that the final reward is due.

    Returns:
        Parts by name: those of each turn, and those of the end.
    """
    of_turns = []
    for text, records in zip(turns, calls, strict=True):
        env._turns.append(text)
        env._calls.extend(dict(record) for record in records)
        parsed = env._parser.parse(text)
        _, answer = env._calls_and_answer(parsed)
        said = parsed.content if answer is None else answer
        of_turns.append(await env._turn_parts(said, [dict(record) for record in records]))
    if not finished or not turns:
        return of_turns, {}
    seen = [{k: call[k] for k in ("name", "arguments", "error") if k in call} for call in env._calls]
    final = await RewardSet(reward_of(env))(said, env.row.get("answer"), turns=list(turns), calls=seen, row=env.row)
    return of_turns, final
