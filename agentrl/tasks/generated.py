"""Tasks made by a seeded generator, with train and test sets that share none."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import DataError
from agentrl.tasks.dataset import Columns, open_rows
from agentrl.values import check_number

Row = dict[str, Any]
Make = Callable[[np.random.Generator], tuple[Any, Row]]
"""Draws a task: what makes it this task (any JSON value, its identity), and its row."""

NUM_TASKS = {"train": 65_536, "test": 1_024}
TEST_SHARE = 5
"""One identity in so many belongs to the test set."""

LEVELS = ("easy", "medium", "hard")


class GeneratedTasks(Sequence[Row]):
    """The tasks of one split, made when asked for: ``makers`` says by kind and level how one is drawn, ``name`` is the
    first part of their ids. Another ``seed``, other tasks.

    Each kind of task at each level takes its turn, so any run of consecutive indices holds all of them in the same
    proportion. A task belongs to the split that a hash of its identity says, so no task is in both."""

    def __init__(self, name: str, makers: Mapping[str, Make], split: str, seed: int = 0) -> None:
        check_number("task_seed", seed, 0)
        self._name, self._split, self._seed = name, split, seed
        self._makers = list(makers.items())

    def __len__(self) -> int:
        return NUM_TASKS[self._split]

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        kind, make = self._makers[index % len(self._makers)]
        rng = np.random.default_rng([zlib.crc32(f"{self._name} {self._split}".encode()), self._seed, index])
        while True:  # ends after a few draws: the share of either split is known
            identity, row = make(rng)
            if (zlib.crc32(repr((kind, identity)).encode()) % TEST_SHARE == 0) == (self._split == "test"):
                return {**row, "task_id": f"{self._name}-{self._seed}/{self._split}/{index}", "kind": kind}


def own_tasks(
    train_data: str | Path | None, test_data: str | Path | None, input_key: str, label_key: str
) -> dict[str, Sequence[Row]]:
    """The user's tasks by split, in any form that :func:`agentrl.load_tasks` takes; None for no such split. Every row
    needs an answer.
    Raises DataError: a file cannot be used, or an answer is missing; the text names the file."""
    columns = Columns(input_key, label_key, keep=("category",))
    tasks: dict[str, Sequence[Row]] = {"train": (), "test": ()}
    for split, data in (("train", train_data), ("test", test_data)):
        if data is None:
            continue
        loaded = open_rows(data, columns)
        if loaded.answered < len(loaded.rows):
            missing = len(loaded.rows) - loaded.answered
            raise DataError(f"{data}: {missing} of {len(loaded.rows)} rows have no answer in the column {label_key!r}.")
        tasks[split] = loaded.rows
    return tasks
