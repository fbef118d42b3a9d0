"""Question answering with a search tool, over a synthetic world or over a corpus of one's own."""

from agentrl.envs.builtin.search.env import SearchEnv, SearchTool
from agentrl.envs.builtin.search.search_r1 import SearchR1Env

__all__ = ["SearchEnv", "SearchR1Env", "SearchTool"]
