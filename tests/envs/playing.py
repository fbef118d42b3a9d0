"""Built-in environments through the real episode loop, played by a script on the demo model's template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from agentrl.demo import MODEL_DIR
from agentrl.rollout.episode import EpisodeLimits, play_episode
from agentrl.rollout.policies.scripted import ScriptedClient
from agentrl.rollout.template.chat import ChatTemplate
from agentrl.types import SamplingParams, Task, Trajectory

LIMITS = EpisodeLimits(max_turns=None, max_response_len=128, max_context_len=1920)
"""As with the demo model's defaults, but for the turns, which the environment limits."""


@lru_cache(maxsize=1)
def demo_chat() -> ChatTemplate:
    return ChatTemplate(MODEL_DIR)


def play(
    env: Any, policy: Callable[[Any], str], *, index: int = 0, split: str = "train", limits: EpisodeLimits = LIMITS
) -> list[Trajectory]:
    """One episode; ``policy`` gets the environment and says the next turn."""
    chat = demo_chat()
    task = Task(f"{split}/{index}", seed=index, split=split, options={"index": index})
    episode = play_episode(
        env, task, client=ScriptedClient(lambda prompt, turn: policy(env), chat), chat=chat,
        params=SamplingParams(max_new_tokens=128), limits=limits, trajectory_id=f"e{index}", group_id="g",
    )  # fmt: skip
    trajectories = asyncio.run(asyncio.wait_for(episode, 60))
    assert all(t.error is None for t in trajectories), trajectories[0].error
    return trajectories


def first_prompt_tokens(env: Any, *, index: int = 0, split: str = "train") -> int:
    """Tokens of the first prompt with the demo model's tokenizer; of the longest one, where agents have their own."""
    info = env.reset(seed=index, options={"split": split, "index": index})[1]
    chat = demo_chat()
    prompts = [info, *info.get("prompts", {}).values()]
    return max(len(chat.prompt(p["messages"], p.get("tools"))) for p in prompts)
