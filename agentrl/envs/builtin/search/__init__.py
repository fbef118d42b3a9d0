"""Question answering with a search tool, over a synthetic world or over a corpus of one's own."""

from __future__ import annotations

from typing import Any

__all__ = ["SearchEnv", "SearchR1Env", "SearchTool"]


def __getattr__(name: str) -> Any:
    if name == "SearchR1Env":
        from agentrl.envs.builtin.search.search_r1 import SearchR1Env

        return SearchR1Env
    if name in __all__:
        from agentrl.envs.builtin.search import env

        return getattr(env, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
