"""Task rows from files: JSONL and Parquet, with stable ids and splits by content.

A row's id and its split come from a hash of its content, so that they stay the same when rows are
added, removed or reordered, and the same question never stands in both splits.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError

Row = dict[str, Any]


def read_rows(
    path: str | Path,
    *,
    input_key: str = "prompt",
    label_key: str | None = "label",
    metadata_key: str | None = None,
) -> tuple[Row, ...]:
    """The tasks of a file, read once per process and shared: do not change them.

    Args:
        path: ``.parquet``, or any other suffix for JSON Lines.
        input_key: Column of the prompt: text, or a list of ``{"role", "content"}``.
        label_key: Column of the answer; None, or a column that no row has, for none.
        metadata_key: Column handed on as ``metadata``.

    Returns:
        Dicts of ``prompt``, ``answer``, ``task_id`` (16 hex digits), and ``metadata`` if asked for.

    Raises:
        DataError: The file is missing, empty or not readable, or a row is wrong: the text names file and line.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise DataError(f"there is no data file {str(path)!r} (looked for {file}).")
    stat = file.stat()
    return _read_cached(str(file), (stat.st_mtime_ns, stat.st_size), input_key, label_key, metadata_key)


@functools.lru_cache(maxsize=16)
def _read_cached(
    file: str, version: tuple[int, int], input_key: str, label_key: str | None, metadata_key: str | None
) -> tuple[Row, ...]:
    records = _parquet(file) if file.endswith(".parquet") else _json_lines(file)
    rows: list[Row] = []
    copies: dict[str, int] = {}
    for where, record in records:
        row: Row = {"prompt": _prompt(record, input_key, where), "answer": None}
        if label_key is not None:
            row["answer"] = record.get(label_key)
        if metadata_key is not None:
            if metadata_key not in record:
                raise DataError(f"{where}: no key {metadata_key!r}; the row has {_keys(record)}.")
            row["metadata"] = record[metadata_key]
        digest = content_hash([row["prompt"], row["answer"]])
        copies[digest] = copies.get(digest, 0) + 1
        row["task_id"] = digest if copies[digest] == 1 else f"{digest}-{copies[digest]}"
        rows.append(row)
    if not rows:
        raise DataError(f"{file} holds no rows.")
    return tuple(rows)


def split_rows(rows: Sequence[Row], test_fraction: float) -> dict[str, Sequence[Row]]:
    """Rows by split: ``train``, ``test`` and ``all``.

    Args:
        rows: As of :func:`read_rows`.
        test_fraction: Share of the rows held out, in expectation; 0 holds out none.

    Raises:
        ConfigError: The share is not between 0 and 1.
    """
    if not 0.0 <= test_fraction <= 1.0:
        raise ConfigError(f"test_fraction must be between 0 and 1, got {test_fraction}.")
    held_out = [int(row["task_id"][:8], 16) < test_fraction * 2**32 for row in rows]
    return {
        "train": [row for row, out in zip(rows, held_out, strict=True) if not out],
        "test": [row for row, out in zip(rows, held_out, strict=True) if out],
        "all": rows,
    }


def content_hash(value: Any) -> str:
    """16 hex digits of a JSON value's content; the same on every machine."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _json_lines(file: str) -> Iterator[tuple[str, Row]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                record = json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}).") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}.") from error
            except RecursionError as error:
                raise DataError(f"{where}: nested too deeply.") from error
            if not isinstance(record, dict):
                raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}.")
            yield where, record


def _parquet(file: str) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{file}: reading Parquet needs the package pyarrow (pip install pyarrow).") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _prompt(record: Row, key: str, where: str) -> Any:
    if key not in record:
        raise DataError(f"{where}: no key {key!r}; the row has {_keys(record)}. Set --input-key.")
    prompt = record[key]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: {key!r} must be text or a list of messages, got {type(prompt).__name__}.")
    for message in prompt:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise DataError(f"{where}: a message needs 'role' and 'content' as text, got {message!r:.120}.")
    return prompt


def _keys(record: Row) -> str:
    return ", ".join(repr(key) for key in record) or "none"
