"""Makes the index of task data piece by piece; as ``python -m agentrl.tasks.indexing``, one process of several.

An index has an entry of 32 bytes a row: where the row lies, and the hashes its id and split come from. Rows of JSON
Lines and of Arrow files are found where they are. Parquet cannot be read row by row, so its rows are written
once more, as Arrow, beside the index.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.tasks.dataset import Columns, fingerprint
from agentrl.tasks.files import (
    BATCH_ROWS,
    LinePlace,
    Record,
    TaskFile,
    Version,
    arrow_batches,
    arrow_table,
    json_lines,
    parquet_row_groups,
    require_pyarrow,
)

ENTRY = np.dtype(
    [("shard", "<u4"), ("length", "<u4"), ("offset", "<u8"), ("digest", "<u8"), ("copy", "<u4"), ("bucket", "<u4")]
)
"""Of a row: its shard, its place there (byte and length of a line, or number of the row), content hash, which of equal
rows it is, and the place of its prompt between 0 and 2**32."""

LEAST_BYTES = 1 << 20
"""No piece is smaller, and files that are together smaller are indexed without further processes."""

_ENTRIES_AT_ONCE = 16_384


@dataclass(frozen=True)
class Piece:
    """A part of one task file that one process indexes.

    Attributes:
        number: Place among all pieces; entries of a lower one come first.
        path: The task file.
        kind: ``jsonl``, ``parquet`` or ``arrow``.
        shard: Number under which readers find the rows.
        start: First byte, row group or row.
        end: One past the last.
        first_row: Rows of the file before this piece, where that is known.
    """

    number: int
    path: str
    kind: str
    shard: int
    start: int
    end: int
    first_row: int = 0

    def entries(self, folder: Path) -> Path:
        """File of its entries."""
        return folder / f"entries-{self.number}.bin"

    def counts(self, folder: Path) -> Path:
        """File of its counts, written last."""
        return folder / f"counts-{self.number}.json"

    def rows(self, folder: Path) -> Path:
        """File of its rows, where they are written once more."""
        return folder / f"rows-{self.number}.arrow"


@dataclass(frozen=True)
class Shard:
    """A file that readers take rows from.

    Attributes:
        path: The file; of a copy, its name in the index's folder.
        kind: ``jsonl`` or ``arrow``.
        split: The split its rows were written as.
        size: Bytes of the file the rows come from, and
        mtime_ns: when it was changed: another file by then is another set of tasks.
        copy_of: Of a copy, the file its rows come from, and
        first_row: how many rows stand before them there.
    """

    path: str
    kind: str
    split: str | None
    size: int
    mtime_ns: int
    copy_of: str | None = None
    first_row: int = 0


def cut(versions: Sequence[Version], pieces: int) -> tuple[list[Piece], list[Shard]]:
    """Cuts files into about ``pieces`` equal pieces, in the order of the rows, and says where these will be read."""
    size = max(LEAST_BYTES, sum(version[1] for version in versions) // max(1, pieces))
    found: list[Piece] = []
    shards: list[Shard] = []
    for path, whole, mtime, kind, split in versions:
        if kind != "parquet":
            shards.append(Shard(path, kind, split, whole, mtime))
        for start, end, first_row in _ranges(TaskFile(path, kind), whole, size):
            piece = Piece(len(found), path, kind, len(shards) - (kind != "parquet"), start, end, first_row)
            if kind == "parquet":
                shards.append(Shard(piece.rows(Path()).name, "arrow", split, whole, mtime, path, first_row))
            found.append(piece)
    return found, shards


def _ranges(file: TaskFile, whole: int, size: int) -> Iterator[tuple[int, int, int]]:
    """``(start, end, first row)`` of each piece of a file of ``whole`` bytes, about ``size`` bytes each."""
    if file.kind == "jsonl":
        for start in range(0, whole, size):
            yield start, min(whole, start + size), 0
        return
    if file.kind == "arrow":
        rows = arrow_table(file.path).num_rows
        step = max(1, rows // max(1, whole // size))
        for start in range(0, rows, step):
            yield start, min(rows, start + step), start
        return
    groups = parquet_row_groups(file)
    step = max(1, len(groups) // max(1, whole // size))
    for start in range(0, len(groups), step):
        yield start, min(len(groups), start + step), sum(groups[:start])


def index_piece(piece: Piece, columns: Columns, folder: Path, *, parent: int | None = None) -> None:
    """Writes entries and counts of a piece, and its rows if they have to be copied.

    Args:
        parent: Process to end with: a worker whose parent is gone stops.

    Raises:
        DataError: A row is wrong; the text names file and line.
    """
    answered = chats = rows = 0
    entries: list[tuple[int, int, int, int, int, int]] = []
    with open(piece.entries(folder), "wb") as stream:
        for where, offset, length, record in _located(piece, columns, folder):
            row = columns.row(record, where)
            entries.append((piece.shard, length, offset, *_hashes(row)))
            answered += row["answer"] is not None
            chats += not isinstance(row["prompt"], str)
            if len(entries) == _ENTRIES_AT_ONCE:
                if parent is not None and os.getppid() != parent:
                    raise SystemExit(1)
                rows += _write(stream, entries)
        rows += _write(stream, entries)
    counts = {"rows": rows, "answered": answered, "chats": chats}
    piece.counts(folder).write_text(json.dumps(counts), encoding="ascii")


def _hashes(row: dict[str, Any]) -> tuple[int, int, int]:
    digest, bucket = fingerprint(row)
    return digest, 1, bucket


def _write(stream: Any, entries: list[tuple[int, ...]]) -> int:
    count = len(entries)
    stream.write(np.array(entries, ENTRY).tobytes())
    entries.clear()
    return count


def _located(piece: Piece, columns: Columns, folder: Path) -> Iterator[tuple[object, int, int, Record]]:
    """``(where, offset, length, record)`` of each row."""
    if piece.kind == "jsonl":
        for line, record in json_lines(piece.path, piece.start, piece.end):
            if record is not None:
                yield LinePlace(piece.path, line.offset), line.offset, line.length, record
        return
    batches = _arrow_piece(piece, columns) if piece.kind == "arrow" else _copied(piece, columns, folder)
    number = piece.first_row
    for batch in batches:
        for record in batch.to_pylist():
            offset = number if piece.kind == "arrow" else number - piece.first_row
            number += 1
            yield f"{piece.path}, row {number}", offset, 0, record


def _arrow_piece(piece: Piece, columns: Columns) -> Iterator[Any]:
    table = arrow_table(piece.path, columns.selection())
    yield from table.slice(piece.start, piece.end - piece.start).to_batches(max_chunksize=BATCH_ROWS)


def _copied(piece: Piece, columns: Columns, folder: Path) -> Iterator[Any]:
    """Row groups of Parquet, each batch written as Arrow before it is handed on."""
    pyarrow = require_pyarrow(piece.path)
    groups = range(piece.start, piece.end)
    writer = None
    try:
        for batch in arrow_batches(TaskFile(piece.path, "parquet"), columns.selection(), groups):
            writer = writer or pyarrow.ipc.new_stream(str(piece.rows(folder)), batch.schema)
            writer.write_batch(batch)
            yield batch
    finally:
        if writer is not None:
            writer.close()


def main() -> int:
    """Indexes the pieces named on standard input; an error is written to ``error-<process id>.json``."""
    job = json.load(sys.stdin)
    folder = Path(job["folder"])
    keep = job["columns"].pop("keep")
    columns = Columns(**job["columns"], keep=None if keep is None else tuple(keep))
    try:
        for piece in job["pieces"]:
            index_piece(Piece(**piece), columns, folder, parent=job["parent"])
    except AgentRLError as error:
        kind = "data" if isinstance(error, DataError) else "config" if isinstance(error, ConfigError) else "other"
        report = {"kind": kind, "text": str(error)}
        (folder / f"error-{os.getpid()}.json").write_text(json.dumps(report), encoding="utf-8")
        return 1
    return 0


def job_of(pieces: list[Piece], columns: Columns, folder: Path) -> str:
    """What :func:`main` reads."""
    return json.dumps(
        {
            "folder": str(folder),
            "columns": asdict(columns),
            "pieces": [asdict(piece) for piece in pieces],
            "parent": os.getpid(),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
