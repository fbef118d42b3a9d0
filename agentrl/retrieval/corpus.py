"""Passages, and a JSONL corpus of them on disk."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentrl.errors import DataError


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


def scan(path: Path) -> Iterator[tuple[Passage, int]]:
    """Every passage of a JSONL file with the offset at which its line ends. Empty lines may only end the file.

    Raises:
        DataError: file and line of the first bad line, or the file has no passage.
    """
    end = blank_line = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                blank_line = blank_line or number
                continue
            if blank_line:
                raise DataError(f"{path}:{blank_line}: an empty line between passages; remove it")
            end += len(line)
            yield _parse(path, line, number - 1), end
    if not end:
        raise DataError(f"{path}: no passage in the file; expected one JSON object a line")


def _parse(path: Path, line: bytes, number: int) -> Passage:
    try:
        return parse_passage(json.loads(line), number)
    except ValueError as error:  # also bad JSON and bad UTF-8
        raise DataError(f"{path}:{number + 1}: {error}") from error


class JsonlCorpus(Sequence[Passage]):
    """The passages of a JSONL file by number, read through a memory map when asked for. Safe to read from threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = np.array([0, *(end for _, end in scan(path))], dtype=np.int64)
        with path.open("rb") as file:  # the map outlives the file it was made from
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Passage:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(f"passage {number} of a corpus of {len(self)}")
        return _parse(self.path, self._map[self._offsets[number] : self._offsets[number + 1]], number)
