"""``SearchEnv``: answer questions with a search tool, one search or two before the answer is known."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

from agentrl.envs.builtin.search.questions import WorldQuestions, load_questions
from agentrl.envs.builtin.search.world import TWO_HOP_SHARE, get_world, world_index
from agentrl.envs.tool_env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.retrieval import LocalRetriever, Retriever
from agentrl.rewards import exact_match
from agentrl.tools.builtin.search import SearchTool, absolute, format_passages, open_retriever
from agentrl.values import check_number

SYSTEM_PROMPT = "Find facts with the search tool, then reply with Answer: and the short answer."
"""Short, because every episode begins with it; the demo model was trained on it."""

ANSWER_MARK = "Answer:"
TOOL_DESCRIPTION = "Search the encyclopedia."

_building = threading.Lock()


def final_answer(text: str) -> str:
    """What counts as the answer in the model's last turn: what follows the last ``Answer:``, else all of it."""
    return text.rpartition(ANSWER_MARK)[2].strip()


def search_tool_schema() -> dict[str, Any]:
    """The search tool as a model is told about it."""
    tool = SearchTool.__new__(SearchTool)
    tool.description = TOOL_DESCRIPTION
    return tool.schema()


@functools.lru_cache(maxsize=4)
def _world_retriever(world_seed: int) -> Retriever:
    return LocalRetriever(functools.partial(world_index, world_seed))


def shared_retriever(
    url: str | None = None,
    corpus: str | Path | None = None,
    index_dir: str | Path | None = None,
    world_seed: int = 0,
    patience: float = 300.0,
) -> Retriever:
    """The retriever of these settings, one a process: a server, else a corpus, else the synthetic world."""
    if url and corpus:
        raise ConfigError(f"retriever={url!r} and corpus={corpus!r} exclude each other: give one")
    if url or corpus:
        return open_retriever(url=url or None, patience=patience, corpus=corpus or None, index_dir=index_dir or None)
    with _building:
        return _world_retriever(world_seed)


class QuestionEnv(ToolEnv):
    """What the search environments share: where questions and passages come from.

    Args:
        world_seed: which synthetic world, where no files are given.
        two_hop: share of the world's questions that need two searches, 0 to 1.
        topk: passages a search returns.
        retriever: URL of a server with Search-R1's ``/retrieve`` API; its key is read from the environment
            variable ``AGENTRL_RETRIEVER_KEY``.
        retriever_patience: seconds for which a search waits for that server when it is away.
        corpus: a JSONL corpus to search in this process instead.
        index_dir: where the index of ``corpus`` is kept; default ``<corpus>.bm25``.
        train_data: questions to train on (JSONL or Parquet) instead of the world's.
        test_data: held-out questions; needed when ``train_data`` is given.

    Raises:
        ConfigError: an argument is out of range, or two exclude each other.
        DataError: a file cannot be used; file and line are named.
    """

    show_passages = staticmethod(format_passages)
    """How results are written down."""

    def __init__(
        self,
        *,
        world_seed: int = 0,
        two_hop: float = TWO_HOP_SHARE,
        topk: int = 1,
        retriever: str | None = None,
        retriever_patience: float = 300.0,
        corpus: str | Path | None = None,
        index_dir: str | Path | None = None,
        train_data: str | Path | None = None,
        test_data: str | Path | None = None,
    ) -> None:
        check_number("topk", topk, 1)
        check_number("two_hop", two_hop, 0, 1, whole=False)
        paths = {"train": train_data, "test": test_data}
        if train_data or test_data:
            self.tasks = {split: load_questions(absolute(path)) if path else () for split, path in paths.items()}
        else:
            world = get_world(world_seed)
            self.tasks = {split: WorldQuestions(world, split, two_hop) for split in self.splits}
        source = shared_retriever(retriever, corpus, index_dir, world_seed, retriever_patience)
        self.tools = [SearchTool(retriever=source, topk=topk, show=self.show_passages, description=TOOL_DESCRIPTION)]


class SearchEnv(QuestionEnv):
    """Questions about a synthetic world, or about a corpus of one's own, with a native tool call ``search``.

    A turn without a call is the final answer; it is right when what follows ``Answer:`` (or the whole turn)
    matches a gold answer exactly after SQuAD's normalization. Only what the model wrote is read.

    Example:
        >>> env = SearchEnv()
        >>> question, info = env.reset(options={"split": "test", "index": 3})
        >>> question
        'In which city is the employer of Frank Norworth based?'
        >>> call = '<tool_call>{"name": "search", "arguments": {"query": "employer of Frank Norworth"}}</tool_call>'
        >>> env.step(call)[0]
        '- Frank Norworth was born in ... and works for Terraline Bank. The teacher of Frank Norworth was ...'
    """

    max_turns = 6
    system_prompt = SYSTEM_PROMPT

    async def reward(self, text: str, answer: str | list[str]) -> dict[str, float]:
        """1.0 for an exact match of the final answer, else 0.0."""
        return {"exact_match": exact_match(final_answer(text), answer)}
