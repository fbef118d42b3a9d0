"""``PromptEnv``: prompts from a file, one answer each, judged by a reward function."""

from __future__ import annotations

from typing import Any

from agentrl import rewards
from agentrl.envs.tool_env import ToolEnv
from agentrl.errors import DataError
from agentrl.tasks.dataset import Columns, Source, open_rows, split_rows
from agentrl.types import Message


class PromptEnv(ToolEnv):
    """Single-turn tasks over task data.

    Splits: those the data has of its own; else ``train``, ``test`` (the share ``test_fraction``, by content hash)
    and ``all`` (everything, for data that is itself the held-out set).

    Args:
        path: The data, see :func:`agentrl.load_tasks`.
        input_key: Column of the prompt, text or chat messages.
        label_key: Column of the answer.
        metadata_key: Column handed to the reward as ``row["metadata"]``.
        apply_chat_template: False: ``info["raw_prompt"]`` holds the text to send without a template.
        reward: A name (see :data:`agentrl.rewards.BUILT_IN`; ``remote_rm`` with ``rm_url``), a
            function or class, ``module:name`` or ``file.py:name``, or a list of them, each alone or
            as ``(weight, reward)``; called as ``reward(text, answer)``, see :mod:`agentrl.rewards`.
        rm_url: Address of the server that ``remote_rm`` asks.
        test_fraction: Share of the rows held out of training.
        data_seed: Handed to a function that makes the rows and takes ``seed``.
        streaming: Leave the rows on disk.
        workers: Processes that make the index of them.
        cache_dir: Where the index is kept; None for the user's cache folder.

    A column ``category`` is handed on as ``info["category"]``, for scores by category.

    Raises:
        DataError: The data cannot be used; the text names the line.
        ConfigError: Unknown reward.
    """

    call_format = "none"

    def __init__(
        self,
        path: Source,
        *,
        input_key: str = "prompt",
        label_key: str | None = "label",
        metadata_key: str | None = None,
        apply_chat_template: bool = True,
        reward: Any = "exact_match",
        rm_url: str | None = None,
        test_fraction: float = 0.0,
        data_seed: int = 0,
        streaming: bool = False,
        workers: int = 1,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        remote = reward == "remote_rm"
        self.reward = rewards.resolve(rewards.RemoteReward(rm_url) if remote and rm_url is not None else reward)
        columns = Columns(input_key, label_key, metadata_key, ("category",), rewards.compares(self.reward))
        loaded = open_rows(path, columns, seed=data_seed, streaming=streaming, workers=workers, cache_dir=cache_dir)
        if not apply_chat_template and loaded.chats:
            raise DataError(f"{path} has prompts in chat form: they need a chat template (apply_chat_template).")
        self.tasks = split_rows(loaded, test_fraction)
        self.splits = tuple(self.tasks)
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
