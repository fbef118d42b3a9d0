"""Passages, and a JSONL corpus of them on disk."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentrl.errors import DataError
from agentrl.jsonl import Place, json_lines, parse_line


class Passage(NamedTuple):
    """One retrievable text. ``title`` may be empty."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title in quotes, newline, body: the form that Search-R1's corpora and servers use."""
        return f'"{self.title}"\n{self.text}'


def parse_passage(record: Any, number: int) -> Passage:
    """A passage from one JSON record: ``{"contents": "\\"Title\\"\\nbody"}`` or ``{"title", "text"}``.

    ``id`` (or ``_id``) is optional; the record's number, from 0, takes its place.

    Raises:
        ValueError: the record has neither form; the text says what was found.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    identity = str(record.get("id", record.get("_id", number)))
    if isinstance(record.get("text"), str):
        return Passage(identity, str(record.get("title") or ""), record["text"])
    if isinstance(record.get("contents"), str):
        title, newline, body = record["contents"].partition("\n")
        return Passage(identity, title.strip().strip('"'), body) if newline else Passage(identity, "", title)
    raise ValueError(f'expected a string under "contents" or "text", got the keys {sorted(map(str, record))}')


def scan(path: Path) -> Iterator[tuple[Passage, Place, int]]:
    """Every passage of a JSONL file, its place and its length in bytes.
    Raises DataError: the file cannot be read, a line of it is no passage (named), or it has none."""
    number = -1
    for number, (place, length, record) in enumerate(json_lines(str(path))):
        yield _passage(record, number, place), place, length
    if number < 0:
        raise DataError(f"{path}: no passage in the file; expected one JSON object a line")


def _passage(record: Any, number: int, place: Place) -> Passage:
    try:
        return parse_passage(record, number)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error


class JsonlCorpus(Sequence[Passage]):
    """The passages of a JSONL file by number, read through a memory map when asked for. Safe to read from threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        spans = (number for _, place, length in scan(path) for number in (place.number, length))
        self._spans = np.fromiter(spans, np.int64).reshape(-1, 2)  # first byte and length of each line
        with path.open("rb") as file:  # the map outlives the file it was made from
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, number: int) -> Passage:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(f"passage {number} of a corpus of {len(self)}")
        start, length = self._spans[number].tolist()
        place = Place(str(self.path), start, is_line=True)
        return _passage(parse_line(self._map[start : start + length], place), number, place)
