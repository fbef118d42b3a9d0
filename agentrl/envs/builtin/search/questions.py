"""Questions as rows of a :class:`~agentrl.envs.tool_env.ToolEnv`: from a world, or from a file."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.envs.builtin.search.world import NUM_QUESTIONS, World
from agentrl.errors import DataError
from agentrl.tasks.files import find_files, read_records

Row = dict[str, Any]


class WorldQuestions(Sequence[Row]):
    """The questions of one split of a world, made when asked for. ``two_hop``: share of those that need two
    searches."""

    def __init__(self, world: World, split: str, two_hop: float) -> None:
        self._world = world
        self._split = split
        self._two_hop = two_hop

    def __len__(self) -> int:
        return NUM_QUESTIONS[self._split]

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        question = self._world.question(self._split, index, two_hop_share=self._two_hop)
        return {
            "prompt": question.text,
            "answer": question.answer,
            "task_id": f"search-{self._world.seed}/{self._split}/{index}",
            "hops": question.hops,
            "category": f"{question.hops}-hop",
        }


@functools.lru_cache(maxsize=8)
def load_questions(path: str) -> tuple[Row, ...]:
    """Questions of a JSONL or Parquet file, read once a process.

    A record holds ``question`` and the accepted answers under ``golden_answers``, ``answers`` or ``answer`` (a
    string or a list of strings), or is a row of Search-R1's own data (``reward_model.ground_truth.target``).

    Raises DataError: the file is missing or empty, or a record is not a question; file and line are named."""
    rows = []
    for place, record in (found for file in find_files(path) for found in read_records(file)):
        try:
            question, answers = _question_and_answers(record)
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
        origin = record.get("data_source") or Path(path).stem
        ids = [record[key] for key in ("task_id", "id") if isinstance(record.get(key), (str, int))]
        own = {"task_id": str(ids[0])} if ids else {}
        kind = {"data_source": str(origin), "category": str(origin)}
        rows.append({"prompt": question, "answer": answers, **own, **kind})
    if not rows:
        raise DataError(f"{path}: no question in the file; expected one JSON object a line")
    return tuple(rows)


def _question_and_answers(record: dict[str, Any]) -> tuple[str, list[str]]:
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'expected text under "question", got the keys {sorted(record)}')
    answers = next((record[k] for k in ("golden_answers", "answers", "answer") if record.get(k) is not None), None)
    if answers is None:
        truth = (record.get("reward_model") or {}).get("ground_truth") or {}
        answers = truth.get("target")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError('expected the answers (text or a list of texts) under "golden_answers", "answers" or "answer"')
    return question.strip(), answers
