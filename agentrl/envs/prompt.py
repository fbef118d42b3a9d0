"""``PromptEnv``: prompts from a file, one answer each, judged by a reward function."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl import rewards
from agentrl.envs.dataset import read_rows, split_rows
from agentrl.envs.tool_env import ToolEnv
from agentrl.errors import DataError
from agentrl.types import Message


class PromptEnv(ToolEnv):
    """Single-turn tasks over a JSONL or Parquet file.

    Splits: ``train``, ``test`` (the share ``test_fraction``, by content hash) and ``all`` (the whole
    file, for a file that is itself the held-out set).

    Args:
        path: The file, see :func:`agentrl.envs.dataset.read_rows`.
        input_key: Column of the prompt, text or chat messages.
        label_key: Column of the answer.
        metadata_key: Column handed to the reward as ``row["metadata"]``.
        apply_chat_template: False: ``info["raw_prompt"]`` holds the text to send without a template.
        reward: A name (``exact_match``, ``f1``, ``math``), a function, ``module:function`` or
            ``file.py:function``; called as ``reward(text, answer)``, see :mod:`agentrl.rewards`.
        test_fraction: Share of the rows held out of training.

    Raises:
        DataError: The file cannot be used; the text names the line.
        ConfigError: Unknown reward.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "test", "all")
    call_format = "none"

    def __init__(
        self,
        path: str,
        *,
        input_key: str = "prompt",
        label_key: str | None = "label",
        metadata_key: str | None = None,
        apply_chat_template: bool = True,
        reward: Any = "exact_match",
        test_fraction: float = 0.0,
    ) -> None:
        super().__init__()
        rows = read_rows(path, input_key=input_key, label_key=label_key, metadata_key=metadata_key)
        if not apply_chat_template and any(not isinstance(row["prompt"], str) for row in rows):
            raise DataError(f"{path} has prompts in chat form: they need a chat template (apply_chat_template).")
        self.reward = rewards.load(reward)
        if reward in rewards.BUILT_IN and all(row["answer"] is None for row in rows):
            raise DataError(
                f"{path} has no column {label_key!r}, which the reward {reward!r} compares with. Set --label-key."
            )
        self.tasks = split_rows(rows, test_fraction)
        self.apply_chat_template = apply_chat_template

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = await super().areset(seed=seed, options=options)
        if not self.apply_chat_template:
            info["raw_prompt"] = self.row["prompt"]
        return observation, info

    def first_messages(self, row: dict[str, Any]) -> list[Message]:
        if self.apply_chat_template:
            return super().first_messages(row)
        return [Message(role="user", content=row["prompt"])]
