"""JSON files: an object, or one a line, and where each stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DataError

Record = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a row stood, for messages: of JSON Lines the byte at which its line begins, else its number from 0."""

    file: str
    number: int
    is_line: bool = False

    def __str__(self) -> str:
        if not self.is_line:
            return f"{self.file}, row {self.number + 1}"
        lines, left = 1, self.number  # counted only when somebody wants to read it
        with open(self.file, "rb") as stream:
            while left > 0 and (data := stream.read(min(left, 1 << 20))):
                lines += data.count(b"\n")
                left -= len(data)
        return f"{self.file}:{lines}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises DataError naming the file: it cannot be read, or holds no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected an object, got {type(values).__name__}")
    return values


def json_lines(path: str, start: int = 0, end: int | None = None) -> Iterator[tuple[Place, int, Record]]:
    """Place, length in bytes and content of each line that begins in ``[start, end)`` and is not blank.
    Raises DataError: a line is not a JSON object, the text names file and line; or the file cannot be read."""
    try:
        with open(path, "rb") as stream:
            if start:
                stream.seek(start - 1)
                stream.readline()  # the rest of a line that begins before
            while (end is None or stream.tell() < end) and (data := stream.readline()):
                place = Place(path, stream.tell() - len(data), is_line=True)
                if data.strip():
                    yield place, len(data), parse_line(data, place)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def parse_line(data: bytes, place: object) -> Record:
    """A line's JSON object. Raises DataError that says where it stood."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise DataError(f"{place}: not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object, got {type(record).__name__}.")
    return record
