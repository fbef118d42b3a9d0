"""Calls into users' code: environments that block, rewards that are no numbers, exceptions that end everything."""

from __future__ import annotations

import math
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.tools.threads import run_blocking


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


def entry_point(env: Any, name: str) -> Callable[..., Awaitable[Any]]:
    """``env.areset`` or ``env.astep``; of an environment without it the blocking one, in a thread."""
    coroutine_function = getattr(env, f"a{name}", None)
    if coroutine_function is not None:
        return coroutine_function

    def in_thread(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        return run_blocking(getattr(env, name), *args, **kwargs)

    return in_thread
