from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.concurrency.backend import Backend

RIVERS = [
    {"id": "n", "contents": '"Nile"\nThe Nile is a river in Egypt.'},
    {"id": "d", "contents": '"Danube"\nThe Danube is a river that reaches the Black Sea.'},
    {"id": "o", "title": "Oslo", "text": "Oslo is the capital of Norway. Oslo lies on a fjord."},
]


@pytest.fixture(autouse=True)
def _nothing_stays_away() -> Iterator[None]:
    """Episodes of other tests would wait for it."""
    yield
    for backend in list(Backend.away):
        backend.up()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(records: list, name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def corpus(write_jsonl: Callable[..., Path]) -> Path:
    return write_jsonl(RIVERS)
