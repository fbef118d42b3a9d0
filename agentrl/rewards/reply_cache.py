"""Replies of judges, so that the same text is judged once: in memory, or in a file that several processes share."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import ConfigError

log = logging.getLogger(__name__)

MEMORY_ENTRIES = 10_000
_LOCK_SECONDS = 20.0


class ReplyCache:
    """Text by key. In memory the entries not used for longest go first; in a file all are kept.

    The file is an SQLite database: a write is whole or not there, and processes wait for one another. A file that
    cannot be used for the moment (locked, disk full) costs a request, never a score; that is logged once.

    Args:
        path: The file, made when it is not there; None for memory.

    Raises:
        ConfigError: The file is something else, or cannot be made.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).expanduser().absolute()
        self._entries: OrderedDict[str, str] = OrderedDict()
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
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        if self.path is None:
            return None
        try:
            with self._database() as database:
                found = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._complain(error)
            return None
        if found is None:
            return None
        self._remember(key, found[0])
        return found[0]

    def put(self, key: str, reply: str) -> None:
        """Keep ``reply`` under ``key``. Blocks for the file."""
        reply = reply.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is no text of a database
        self._remember(key, reply)
        if self.path is None:
            return
        try:
            with self._database() as database:
                database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except sqlite3.Error as error:
            self._complain(error)

    def _remember(self, key: str, reply: str) -> None:
        with self._lock:
            self._entries[key] = reply
            self._entries.move_to_end(key)
            while len(self._entries) > MEMORY_ENTRIES:
                self._entries.popitem(last=False)

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own for each use: any thread, any process, and nothing to close later."""
        with contextlib.closing(sqlite3.connect(str(self.path), timeout=_LOCK_SECONDS)) as database, database:
            yield database

    def _complain(self, error: sqlite3.Error) -> None:
        if not self._complained:
            self._complained = True
            log.warning("%s: the cache of judgements cannot be used: %s", self.path, error)
