"""Puts an index of task data together from pieces that several processes make side by side."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

import agentrl
from agentrl.errors import ConfigError, DataError
from agentrl.tasks.dataset import Columns
from agentrl.tasks.files import TaskFile, Version
from agentrl.tasks.indexing import ENTRY, LEAST_BYTES, Piece, Shard, cut, index_piece, job_of

KIND = "index of agentrl task data"
FORMAT = 1

_PIECES_A_WORKER = 4
_LEAST_BYTES_A_SECOND = 100_000
_LEAST_SECONDS = 300.0


def build(folder: Path, versions: Sequence[Version], columns: Columns, workers: int) -> None:
    """Makes the index in a folder beside ``folder`` and renames it, so that ``folder`` is whole or not there.

    Args:
        folder: Where the index will be.
        versions: The task files, in order.
        columns: Which columns become which entries.
        workers: Processes that share the work.

    Raises:
        DataError: A row is wrong (the text names file and line), or a file was changed meanwhile.
        OSError: ``folder`` cannot be written.
    """
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-{os.getpid()}-", suffix=".partial", dir=folder.parent))
    try:
        pieces, shards = cut(versions, workers * _PIECES_A_WORKER)
        size = sum(version[1] for version in versions)
        if size < LEAST_BYTES:
            for piece in pieces:
                index_piece(piece, columns, partial)
        else:  # even one worker is a process of its own: what reading took of memory goes with it
            _in_processes(pieces, columns, partial, workers, size)
        changed = [v for v in versions if TaskFile(v[0], v[3], v[4]).version() != v]
        if changed:
            raise DataError(f"{changed[0][0]} was changed while it was indexed. Start again when it is whole.")
        _put_together(partial, pieces, shards)
        with contextlib.suppress(OSError):  # there already: another process made the same
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_together(folder: Path, pieces: list[Piece], shards: list[Shard]) -> None:
    """One file of entries and the manifest, of what was made of the pieces."""
    counts = [json.loads(piece.counts(folder).read_text(encoding="ascii")) for piece in pieces]
    rows = sum(count["rows"] for count in counts)
    if not rows:
        raise DataError(f"{', '.join(sorted({shard.path for shard in shards}))[:200] or 'the data'} holds no rows.")
    parts: dict[str, tuple[int, int]] = {}
    done = 0
    with open(folder / "index.bin", "wb") as index:
        for piece, count in zip(pieces, counts, strict=True):
            with piece.entries(folder).open("rb") as entries:
                shutil.copyfileobj(entries, index, 1 << 20)
            split = shards[piece.shard].split
            if split is not None and count["rows"]:
                parts[split] = (parts.get(split, (done,))[0], done + count["rows"])
            done += count["rows"]
            piece.entries(folder).unlink()
            piece.counts(folder).unlink()
    entries = np.memmap(folder / "index.bin", ENTRY, "r+", shape=(rows,))
    entries["copy"] = _copies(entries["digest"])
    entries.flush()
    files = ["index.bin", *(piece.rows(folder).name for piece in pieces if piece.rows(folder).exists())]
    manifest = {
        "kind": KIND,
        "format": FORMAT,
        "rows": rows,
        "answered": sum(count["answered"] for count in counts),
        "chats": sum(count["chats"] for count in counts),
        "parts": parts,
        "shards": [asdict(shard) for shard in shards],
        "sizes": {name: os.path.getsize(folder / name) for name in files},
        "checksum": checksum(entries),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _copies(digests: np.ndarray) -> np.ndarray:
    """Which of the rows with its digest each row is, counted from 1 in the order of the rows."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    places = np.arange(len(ordered))
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    copies = np.empty(len(ordered), np.uint32)
    copies[order] = places - np.maximum.accumulate(np.where(first, places, 0)) + 1
    return copies


def checksum(entries: np.ndarray) -> int:
    """CRC-32 of the entries' bytes."""
    value = 0
    for start in range(0, len(entries), 1 << 15):
        value = zlib.crc32(np.ascontiguousarray(entries[start : start + (1 << 15)]), value)
    return value


def _in_processes(pieces: list[Piece], columns: Columns, folder: Path, workers: int, size: int) -> None:
    """Indexes the pieces in processes of their own; they end with this one."""
    deadline = time.monotonic() + _LEAST_SECONDS + size / _LEAST_BYTES_A_SECOND
    package = str(Path(agentrl.__file__).parents[1])
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
    environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the others keep for long what was freed
    running: list[subprocess.Popen[str]] = []
    try:
        for mine in (pieces[i::workers] for i in range(min(workers, len(pieces)))):
            log_file = (folder / f"worker-{len(running)}.log").open("w+b")
            with log_file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "agentrl.tasks.indexing"],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log_file, text=True, env=environ,
                )  # fmt: skip
            running.append(process)
            with contextlib.suppress(BrokenPipeError):  # it ended already: its return code says so below
                process.stdin.write(job_of(mine, columns, folder))
                process.stdin.close()
        for number, process in enumerate(running):
            try:
                code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise DataError(
                    f"{folder}: the task data was not indexed in time: reading it is slower than "
                    f"{_LEAST_BYTES_A_SECOND:,} bytes a second."
                ) from None
            if code:
                raise _failure(folder, number, code)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
        for leftover in folder.glob("worker-*.log"):
            leftover.unlink()


def _failure(folder: Path, number: int, code: int) -> Exception:
    """What a worker that ended with an error said; of several errors the one that stands first."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("error-*.json"))]
    if reports:
        return (DataError if reports[0]["kind"] == "data" else ConfigError)(reports[0]["text"])
    said = (folder / f"worker-{number}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return DataError(f"a process that indexes the task data ended with code {code}: {said[-1] if said else 'no word'}")
