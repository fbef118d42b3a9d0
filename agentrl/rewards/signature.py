"""Whether a function can be called as rewards are called; said when an environment is made, not when it ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.errors import ConfigError

FROM_SLIME = (("args", "sample"), ("args", "samples"))
"""Names of the first two parameters of slime's hooks."""


def written_for_slime(function: Any) -> bool:
    """Whether a function has the parameters of slime's hooks."""
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return names[:2] in FROM_SLIME


def check_signature(function: Callable[..., Any] | type, name: str, named: Sequence[str]) -> None:
    """Refuses a reward function that a call with ``(text, answer)`` or ``(text)``, and some of ``named``, cannot reach.
    Raises ConfigError: the text says how it is called."""
    call = function.__call__ if inspect.isclass(function) else function
    try:
        parameters = list(inspect.signature(call).parameters.values())[int(inspect.isclass(function)) :]
    except (TypeError, ValueError):  # a built-in function without a signature
        return
    shown = f"reward {name!r} takes ({', '.join(map(str, parameters))})"
    how = (
        f"A reward is called with (text, answer) or (text), and by name with {', '.join(named)} where it asks for them."
    )
    if tuple(p.name for p in parameters)[:2] in FROM_SLIME:
        raise ConfigError(
            f"{shown}, as for slime. {how} What is sample.response there is text here, sample.label is answer, and "
            "sample.metadata is row['metadata'] (--metadata-key)."
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = [p for p in positional if p.name not in named]
    if not free and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(f"{shown}, and no parameter for the text. {how}")
    surplus = [p.name for p in free[2:] if p.default is p.empty]
    surplus += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in named]
    if surplus:
        raise ConfigError(f"{shown}, and nothing gives it {surplus[0]!r}. {how}")
