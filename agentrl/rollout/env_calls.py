"""Calls into users' code: environments that block, and exceptions that end everything."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.concurrency.threads import own_thread
from agentrl.errors import authors_frames


def describe(error: BaseException, frames: int = 3) -> str:
    """``Type: text (file:line in function < ...)``, innermost frame first, file names without folders.

    The frames are those of the author's code, where the error went through any.
    """
    text = f"{type(error).__name__}: {error}"
    stack = (authors_frames(error) or traceback.extract_tb(error.__traceback__))[-frames:]
    if not stack:
        return text
    where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} in {f.name}" for f in reversed(stack))
    return f"{text} ({where})"


def entry_point(env: Any, name: str) -> Callable[..., Awaitable[Any]]:
    """``env.areset`` or ``env.astep``; of an environment without it the blocking one, always in the same thread."""
    coroutine_function = getattr(env, f"a{name}", None)
    if coroutine_function is not None:
        return coroutine_function

    def in_thread(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        return own_thread(getattr(env, "unwrapped", env)).run(getattr(env, name), *args, **kwargs)

    return in_thread
