"""Replies of judges, so that the same text is judged once: in memory, or in a file that several processes share."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import ConfigError

log = logging.getLogger(__name__)

MEMORY_ENTRIES = 10_000
_LOCK_SECONDS = 20.0


class ReplyCache:
    """Text by key. In memory the entries not used for longest go first; in a file, which is made if need be, all are
    kept.

    The file is an SQLite database: a write is whole or not there, and processes wait for one another. A file that
    cannot be used for the moment (locked, disk full) costs a request, never a score; that is logged once.

    Raises ConfigError: the file is something else, or cannot be made."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).expanduser().absolute()
        self._entries: dict[str, str] = {}
        self._lock = threading.Lock()
        self._complained = False
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self._database() as database:
                    database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
            except (sqlite3.Error, OSError) as error:
                raise ConfigError(
                    f"{self.path} cannot be used as a cache of judgements: {error}. Give another file, or remove it if "
                    "it is a damaged one."
                ) from error

    def get(self, key: str) -> str | None:
        """The reply kept under ``key``. Blocks for the file."""
        with self._lock:
            reply = self._entries.pop(key, None)
        if reply is None and (row := self._execute("SELECT reply FROM replies WHERE key = ?", key)) is not None:
            reply = row[0]
        if reply is not None:
            self._remember(key, reply)
        return reply

    def put(self, key: str, reply: str) -> None:
        """Keep ``reply`` under ``key``. Blocks for the file."""
        reply = reply.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is no text of a database
        self._remember(key, reply)
        self._execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, reply)

    def _remember(self, key: str, reply: str) -> None:
        with self._lock:
            self._entries[key] = reply
            if len(self._entries) > MEMORY_ENTRIES:
                del self._entries[next(iter(self._entries))]

    def _execute(self, statement: str, *values: str) -> tuple[str, ...] | None:
        """The first row that a statement gives; None without one, without a file, and where the file fails."""
        if self.path is None:
            return None
        try:
            with self._database() as database:
                row: tuple[str, ...] | None = database.execute(statement, values).fetchone()
                return row
        except sqlite3.Error as error:
            if not self._complained:
                self._complained = True
                log.warning("%s: the cache of judgements cannot be used: %s", self.path, error)
            return None

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own for each use: any thread, any process, and nothing to close later."""
        with contextlib.closing(sqlite3.connect(str(self.path), timeout=_LOCK_SECONDS)) as database, database:
            yield database
