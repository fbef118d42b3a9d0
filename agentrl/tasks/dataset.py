"""Task rows from files and functions, with stable ids and splits by content.

A row's id and its split come from a hash of its content, so that they stay the same when rows are
added, removed or reordered, and the same prompt never stands in both splits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.errors import ConfigError, DataError
from agentrl.jsonl import Record
from agentrl.loading import is_spec, load_object
from agentrl.tasks.files import TaskFile, Version, find_files, read_records

log = logging.getLogger(__name__)

Row = dict[str, Any]
Source = str | os.PathLike[str] | Callable[..., Iterable[Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")

_lock = threading.RLock()


@dataclass(frozen=True)
class Columns:
    """Which columns of a record become which entries of a row.

    Attributes:
        prompt: Column of the prompt: text, or a list of ``{"role", "content"}``.
        answer: Column of the answer; None, or a column that no row has, for none.
        metadata: Column handed on as ``metadata``.
        keep: Further columns to keep where a record has them; None keeps all.

    A column ``task_id`` is kept: it names the row in place of its hash.
    """

    prompt: str = "prompt"
    answer: str | None = "label"
    metadata: str | None = None
    keep: tuple[str, ...] | None = None
    compared: bool = False
    """Whether a reward compares with the answer, so that each row needs one: text, a number, or a list of them."""

    def choose(self, names: list[str]) -> list[str]:
        """Of a table's columns those to read; all where one that is needed is missing, so that an error can say so."""
        if self.keep is None or not {self.prompt, self.metadata or self.prompt} <= set(names):
            return names
        return [name for name in names if name in (self.prompt, self.answer, self.metadata, "task_id", *self.keep)]

    def row(self, record: Record, where: object) -> Row:
        """The row of a record, without its id. Raises DataError that says where it stood."""
        names = record if self.keep is None else (*self.keep, "task_id")
        kept = {name: record[name] for name in names if name in record}
        row: Row = {**kept, "prompt": _prompt(record, self.prompt, where)}
        row["answer"] = None if self.answer is None else record.get(self.answer)
        if self.compared:
            _check_answer(row["answer"], self.answer, record, where)
        own = record.get("task_id")
        if own is not None and (own == "" or isinstance(own, bool) or not isinstance(own, (str, int))):
            raise DataError(f"{where}: 'task_id' must be text or a whole number, got {own!r:.60}.")
        if self.metadata is not None:
            if self.metadata not in record:
                raise DataError(f"{where}: no key {self.metadata!r}; the row has {_keys(record)}.")
            row["metadata"] = record[self.metadata]
        return row


@dataclass(frozen=True, eq=False)
class TaskRows:
    """All rows of a source, before they are split.

    Attributes:
        rows: The rows in order, each with its ``task_id``.
        digests: First 8 bytes of each row's content hash, uint64, shape ``[rows]``.
        buckets: Where each row's prompt falls between 0 and 2**32, uint32, shape ``[rows]``.
        parts: The splits that the source has of its own: name to ``(first, end)`` row. Empty: it has none.
        answered: Rows with an answer.
        chats: Rows whose prompt is a list of messages.
    """

    rows: Sequence[Row]
    digests: np.ndarray
    buckets: np.ndarray
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    answered: int = 0
    chats: int = 0


def load_tasks(
    source: Source,
    *,
    input_key: str = "prompt",
    label_key: str | None = "label",
    metadata_key: str | None = None,
    columns: Sequence[str] | None = None,
    test_fraction: float = 0.0,
    seed: int = 0,
    streaming: bool = False,
    workers: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Sequence[Row]]:
    """Task rows by split, such as a ``ToolEnv`` takes as ``tasks``. They are shared: do not change them.

    Args:
        source: A JSON Lines or Parquet file, a folder or glob of such files, a folder written by ``save_to_disk``
            of a Hugging Face ``Dataset`` or ``DatasetDict``; or a function (itself, ``module:function`` or
            ``file.py:function``) that yields rows, see :func:`function_records`.
        input_key: Column of the prompt: text, or a list of ``{"role", "content"}``.
        label_key: Column of the answer; None, or a column that no row has, for none.
        metadata_key: Column handed on as ``metadata``.
        columns: Further columns to keep; None keeps all.
        test_fraction: Share of the rows held out, in expectation, chosen by a hash of the prompt.
        seed: Handed to a function that takes ``seed``.
        streaming: Leave the rows on disk and read each when it is asked for; only an index of them is made.
        workers: Processes that make this index.
        cache_dir: Where the index is kept; None for the user's cache folder.

    Returns:
        Rows by split. A source that has splits keeps them. Any other has ``train``, ``test`` and ``all``. Each row
        has ``prompt``, ``answer`` and ``task_id`` (its own, else 16 hex digits of a hash of both; ``-2``, ``-3``, ...
        for copies).

    Raises:
        DataError: The source is missing, empty or not readable, or a row is wrong: the text names file and line.
        ConfigError: ``test_fraction`` does not fit, or the function cannot be found.
    """
    wanted = Columns(input_key, label_key, metadata_key, None if columns is None else tuple(columns))
    loaded = open_rows(source, wanted, seed=seed, streaming=streaming, workers=workers, cache_dir=cache_dir)
    return dict(split_rows(loaded, test_fraction))


def open_rows(
    source: Source,
    columns: Columns,
    *,
    seed: int = 0,
    streaming: bool = False,
    workers: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
) -> TaskRows:
    """The rows of a source, opened once a process. Arguments and errors as of :func:`load_tasks`."""
    from agentrl.tasks.streaming import open_files

    if workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}.")
    function = task_function(source)
    with _lock:  # environments are made side by side; the first reads, the others find it read
        if function is not None:
            return _function_rows(function, columns, seed, streaming, workers)
        versions = tuple(file.version() for file in find_files(source))  # type: ignore[arg-type]
        if not streaming:
            return _file_rows(versions, columns)
        folder = None if cache_dir is None else os.path.abspath(os.path.expanduser(cache_dir))
        return open_files(versions, columns, workers, folder)


@functools.lru_cache(maxsize=16)
def _file_rows(versions: tuple[Version, ...], columns: Columns) -> TaskRows:
    files = [TaskFile(path, kind, split) for path, _, _, kind, split in versions]
    records = ((file.split, *found) for file in files for found in read_records(file, columns.choose))
    return collect(records, columns, files[0].path if len(files) == 1 else os.path.dirname(files[0].path))


@functools.lru_cache(maxsize=16)
def _function_rows(
    function: Callable[..., Any], columns: Columns, seed: int, streaming: bool, workers: int
) -> TaskRows:
    from agentrl.tasks.streaming import spool

    records = function_records(function, columns, seed)
    return spool(records, columns, workers) if streaming else collect(records, columns, _name_of(function))


# -- rows ------------------------------------------------------------------------------------------


def collect(records: Iterable[tuple[str | None, object, Record]], columns: Columns, what: str) -> TaskRows:
    """All rows in memory. ``records``: split (None: yet to be split), place and content of each; a split's rows stand
    together. ``what``: their source, for messages.
    Raises DataError: no rows, or a wrong one."""
    rows: list[Row] = []
    digests: list[int] = []
    buckets: list[int] = []
    copies: Counter[int] = Counter()
    taken: dict[str, object] = {}
    parts: dict[str, tuple[int, int]] = {}
    for split, where, record in records:
        row = columns.row(record, where)
        digest, bucket = fingerprint(row)
        copies[digest] += 1
        row["task_id"] = task_id(row, digest, copies[digest])
        if taken.setdefault(row["task_id"], where) is not where:
            raise DataError(
                f"{where}: the task_id {row['task_id']!r} is taken by {taken[row['task_id']]}; it names one task."
            )
        rows.append(row)
        digests.append(digest)
        buckets.append(bucket)
        if split is not None:
            parts[split] = (parts.get(split, (len(rows) - 1,))[0], len(rows))
    if not rows:
        raise DataError(f"{what} holds no rows.")
    answered = sum(row["answer"] is not None for row in rows)
    chats = sum(not isinstance(row["prompt"], str) for row in rows)
    return TaskRows(tuple(rows), np.array(digests, np.uint64), np.array(buckets, np.uint32), parts, answered, chats)


def fingerprint(row: Row) -> tuple[int, int]:
    """``(digest, bucket)``: 8 bytes that identify prompt and answer, and the prompt's place in [0, 2**32)."""
    bucket = int(content_hash(row["prompt"])[:8], 16)
    return int(content_hash([row["prompt"], row["answer"]]), 16), bucket


def copy_numbers(digests: np.ndarray) -> np.ndarray:
    """Which of the rows with its digest each row is, counted from 1 in the order of the rows, uint32 ``[rows]``."""
    order = np.argsort(digests, kind="stable")
    ordered, places = digests[order], np.arange(len(digests))
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    copies = np.empty(len(digests), np.uint32)
    copies[order] = places - np.maximum.accumulate(np.where(first, places, 0)) + 1
    return copies


def task_id(row: Row, digest: int, copy: int) -> str:
    """The row's own id, else that of the ``copy``-th row with this digest, counted from 1."""
    if row.get("task_id") is not None:
        return str(row["task_id"])
    return f"{digest:016x}" if copy == 1 else f"{digest:016x}-{copy}"


def row_id(row: Any) -> str:
    """What names a row wherever it stands: its ``task_id``, else the hash of prompt, answer and what else it holds.

    What is no JSON counts for nothing: the text of an object may be another one in the next process.
    """
    if isinstance(row, Mapping):
        if row.get("task_id") is not None:
            return str(row["task_id"])
        others = {name: value for name, value in row.items() if name not in ("prompt", "answer", "task_id")}
        with contextlib.suppress(TypeError, ValueError):
            if others:
                json.dumps(others)
                return content_hash([row.get("prompt"), row.get("answer"), others])
        return content_hash([row.get("prompt"), row.get("answer")])
    return content_hash(list(row) if isinstance(row, tuple) and len(row) == 2 else [row, None])


def content_hash(value: Any) -> str:
    """16 hex digits of a JSON value's content; the same on every machine."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _prompt(record: Record, key: str, where: object) -> Any:
    if key not in record:
        raise DataError(f"{where}: no key {key!r}; the row has {_keys(record)}. Set --input-key.")
    prompt = record[key]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt {key!r} is empty.")
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
        if message["role"] not in ROLES:
            raise DataError(f"{where}: unknown role {message['role']!r:.60}; expected one of {', '.join(ROLES)}.")
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{where}: the prompt ends with a turn of the assistant; the next turn is the model's.")
    if not any(message["content"].strip() for message in prompt if message["role"] != "system"):
        raise DataError(f"{where}: the prompt {key!r} is empty.")
    # Parquet and Arrow give all messages the same keys; what one has not is null there.
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]


def _check_answer(answer: Any, key: str | None, record: Record, where: object) -> None:
    """Refuses an answer that nothing can equal. Raises DataError."""
    given = answer if isinstance(answer, (list, tuple)) and answer else [answer]
    if all(isinstance(one, (str, bool, int)) or (isinstance(one, float) and math.isfinite(one)) for one in given):
        return
    if key not in record:
        raise DataError(f"{where}: no key {key!r}; the row has {_keys(record)}. Set --label-key.")
    what = "text, a number or a list of them"
    raise DataError(f"{where}: {key!r} is {answer!r:.120}; the reward compares with it, so {what} is expected.")


def _keys(record: Record) -> str:
    return ", ".join(map(repr, record)) or "none"


# -- splits ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def split_rows(loaded: TaskRows, test_fraction: float = 0.0) -> Mapping[str, Sequence[Row]]:
    """Rows by split: the source's own, or ``train``, ``test`` and ``all``. All environments of a process share them.

    Args:
        loaded: The rows.
        test_fraction: Share of the rows held out, in expectation; 0 holds out none. Of a source with splits of its
            own, the share of its ``train`` that becomes ``test``.

    Raises:
        ConfigError: The share is not between 0 and 1, or the source has a ``test`` split, or has no ``train``.
    """
    if not 0.0 <= test_fraction <= 1.0:
        raise ConfigError(f"test_fraction must be between 0 and 1, got {test_fraction}.")
    if not loaded.parts:
        train, test = _by_bucket(loaded, 0, len(loaded.rows), test_fraction)
        return {"train": train, "test": test, "all": loaded.rows}
    splits = {name: loaded.rows[first:end] for name, (first, end) in loaded.parts.items()}
    if test_fraction:
        names = ", ".join(loaded.parts)
        if "test" in splits or "train" not in splits:
            raise ConfigError(
                f"test_fraction {test_fraction:g} takes a test split from a train split; the data has {names} of its "
                "own. Leave it out."
            )
        splits["train"], splits["test"] = _by_bucket(loaded, *loaded.parts["train"], test_fraction)
    _warn_of_overlap(loaded)
    return splits


def _by_bucket(loaded: TaskRows, first: int, end: int, fraction: float) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows of ``[first, end)`` that stay, and those held out."""
    rows = loaded.rows
    if fraction == 0.0:
        return rows[first:end], rows[end:end]
    out = loaded.buckets[first:end] < fraction * 2**32
    stay, held_out = first + np.flatnonzero(~out), first + np.flatnonzero(out)
    if hasattr(rows, "choose"):  # on disk
        return rows.choose(stay), rows.choose(held_out)
    return [rows[i] for i in stay.tolist()], [rows[i] for i in held_out.tolist()]


def _warn_of_overlap(loaded: TaskRows) -> None:
    """Says so when rows of a training split stand in another one too: a score on those means little."""
    if "train" not in loaded.parts:
        return
    first, end = loaded.parts["train"]
    trained = loaded.digests[first:end]
    for name, (start, stop) in loaded.parts.items():
        twice = 0 if name == "train" else int(np.isin(loaded.digests[start:stop], trained).sum())
        if twice:
            log.warning("%d of the %d rows of split %r stand in 'train' too", twice, stop - start, name)


# -- functions -------------------------------------------------------------------------------------


def task_function(source: Source) -> Callable[..., Any] | None:
    """The function that ``source`` is or names; None when it is a path. Raises ConfigError on an unknown name."""
    if callable(source):
        return source
    text = os.fspath(source)
    if os.path.exists(os.path.expanduser(text)) or not is_spec(text):
        return None
    function = load_object(text, "task source")
    if not callable(function):
        raise ConfigError(f"task source {text!r} must be a function that yields rows, got {function!r:.80}.")
    return function


def function_records(
    function: Callable[..., Iterable[Any]], columns: Columns, seed: int
) -> Iterator[tuple[str | None, str, Record]]:
    """Split, place and content of each row of a function, which is called with what it takes by name of ``split`` (then
    for ``train`` and for ``test``) and ``seed``, and yields dicts, ``(prompt, answer)`` or prompts.
    Raises DataError: it yields something else; the text says which row."""
    takes, name = inspect.signature(function).parameters, _name_of(function)
    for p in takes.values():
        free = p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if p.name not in ("split", "seed") and not free:
            raise ConfigError(f"{name} needs {p.name!r}; it is given `split` and `seed` only.")
    for split in ("train", "test") if "split" in takes else (None,):
        made = function(**{key: value for key, value in (("split", split), ("seed", seed)) if key in takes})
        if not isinstance(made, Iterable) or isinstance(made, (str, bytes, Mapping)):
            raise DataError(f"{name} must yield rows, it returned {type(made).__name__}.")
        for number, row in enumerate(made, start=1):
            where = f"{name}, row {number}" + (f" of {split!r}" if split else "")
            yield split, where, _record_of(row, columns, where)


def _record_of(row: Any, columns: Columns, where: str) -> Record:
    if isinstance(row, dict):
        return row
    if isinstance(row, str):
        return {columns.prompt: row}
    if isinstance(row, (tuple, list)) and len(row) == 2:
        return {columns.prompt: row[0], columns.answer or "label": row[1]}
    raise DataError(f"{where}: expected a dict, (prompt, answer) or a prompt, got {type(row).__name__}.")


def _name_of(function: Callable[..., Any]) -> str:
    return f"the task function {getattr(function, '__qualname__', type(function).__name__)}"
