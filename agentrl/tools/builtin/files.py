"""``FilesTool``: files in a folder that the model cannot leave."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.processes.warden import scratch_folder
from agentrl.tools.arguments import ArgumentReader, shorten
from agentrl.tools.base import EpisodeEnv, Tool, ToolError
from agentrl.tools.builtin.jail import Jail, JailError, split

Action = Literal["list", "read", "write", "search"]

MAX_FILES_SEARCHED = 10_000
"""Files that one search looks at."""


class FilesTool(Tool):
    """Lists, reads, writes and searches text files.

    Each episode has a private folder of its own, empty or filled from ``files`` and the task's ``files``, and
    removed when the episode is over. Or all episodes see one ``root``, read-only unless said otherwise.

    Paths are relative to the folder. Absolute paths, ``..``, links (also ones put in place while a call
    runs), pipes and devices are refused. Limits count what one episode does.

    Args:
        root: An existing folder to work in, instead of a private one.
        read_only: Whether writing is refused; default: only with ``root``.
        files: Texts by path that a private folder starts with. The task's ``row["files"]`` are added.
        max_read: Characters of a file that one call shows.
        max_file: Bytes of a file: the most that can be written, and the part of a longer one that can be read.
        max_total: Bytes of all files that an episode writes.
        max_files: Files and folders that an episode makes.
        max_listed: Files that ``list`` shows, and matches that ``search`` shows.
        max_searched: Bytes that one search reads.

    Raises:
        ConfigError: ``root`` is not a folder, or starting files are given for one.
    """

    name = "files"
    description = "Lists, reads, writes and searches text files in a folder."

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        read_only: bool | None = None,
        files: Mapping[str, str] | None = None,
        max_read: int = 8_000,
        max_file: int = 1_000_000,
        max_total: int = 10_000_000,
        max_files: int = 100,
        max_listed: int = 100,
        max_searched: int = 20_000_000,
    ) -> None:
        if root is not None and not Path(root).is_dir():
            raise ConfigError(f"root={str(root)!r} is not a folder; make it first, or leave it out for a private one")
        if root is not None and files:
            raise ConfigError("files are what a private folder starts with; with root, put them there yourself")
        self.root = None if root is None else str(Path(root).absolute())
        self.read_only = root is not None if read_only is None else read_only
        self.files = _texts(files or {}, "files")
        self.max_read, self.max_file, self.max_total = max_read, max_file, max_total
        self.max_files, self.max_listed, self.max_searched = max_files, max_listed, max_searched
        if self.read_only:
            self.parameters = copy.deepcopy(type(self).parameters)
            self.parameters["properties"]["action"]["enum"].remove("write")
            reader = type(self)._reader
            self._reader = ArgumentReader(self.parameters, reader.adapter if reader else None)
            self.description = "Lists, reads and searches text files in a folder."
        self._jail: Jail | None = None
        self._written: dict[str, int] = {}
        self._folders = 0

    def for_episode(self, env: EpisodeEnv) -> FilesTool:
        tool = copy.copy(self)
        tool._jail, tool._written, tool._folders = None, {}, 0
        tool.start(env)
        return tool

    def start(self, env: EpisodeEnv) -> None:
        """Adds the files of the task, ``env.row["files"]``, to those the folder starts with."""
        given = (getattr(env, "row", None) or {}).get("files") if self.root is None else None
        if given is not None:
            self.files = {**self.files, **_texts(given, "a task's 'files'")}

    def close(self) -> None:
        """Removes the private folder."""
        if self._jail is not None:
            self._jail.close()

    @property
    def folder(self) -> Path:
        """The folder of this episode; a private one is made when it is first used."""
        return Path(self._opened().folder)

    def __call__(self, action: Action, path: str = ".", text: str = "", start: int = 1) -> str:
        """Args:
        action: What to do.
        path: The file or folder, relative, such as notes/a.txt.
        text: What to write, or what to search for.
        start: First line to read.
        """
        try:
            if action == "list":
                return self._list(path)
            if action == "read":
                return self._read(path, start)
            if action == "search":
                return self._search(path, text)
            return self._write(path, text)
        except JailError as error:
            raise ToolError(f"files: {error}.") from error

    def _opened(self) -> Jail:
        if self._jail is None:
            if self.root is not None:
                self._jail = Jail(self.root)
            else:
                self._jail = Jail(scratch_folder("agentrl-files-"), remove=True)
                for path, text in self.files.items():
                    self._jail.write(path, text.encode("utf-8"))
        return self._jail

    def _list(self, path: str) -> str:
        found = list(self._opened().files(path, self.max_listed + 1))
        lines = [f"{entry.path} ({entry.size} bytes)" for entry in found[: self.max_listed]]
        if len(found) > self.max_listed:
            lines.append(f"[more than {self.max_listed} files; list a folder of them]")
        return "\n".join(lines) or "no files"

    def _read(self, path: str, start: int) -> str:
        data, size = self._opened().read(path, self.max_file)
        if b"\0" in data[:1000]:
            raise JailError(f"{shorten(path, 80)!r} is not text ({size} bytes)")
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        if not 1 <= start <= max(1, len(lines)):
            raise JailError(
                f"{shorten(path, 80)!r} has {len(lines)} lines; start must be from 1 to {max(1, len(lines))}"
            )
        shown: list[str] = []
        length = 0
        for line in lines[start - 1 :]:
            if shown and length + len(line) > self.max_read:
                break
            shown.append(line)
            length += len(line)
        last, notes = start - 1 + len(shown), []
        if length > self.max_read:
            notes.append(f"line {last} is cut after {self.max_read} characters")
        if last < len(lines):
            notes.append(f"lines {start} to {last} of {len(lines)}; read on with start={last + 1}")
        elif size > len(data):
            notes.append(f"only the first {len(data)} of {size} bytes can be read")
        result = "".join(shown)[: self.max_read] or "[the file is empty]"
        return f"{result.rstrip()}\n[{'; '.join(notes)}]" if notes else result

    def _write(self, path: str, text: str) -> str:
        if self.read_only:
            raise JailError("the folder is read-only")
        data = text.encode("utf-8", "replace")
        if len(data) > self.max_file:
            raise JailError(f"a file has at most {self.max_file} bytes, this text has {len(data)}")
        jail, name = self._opened(), os.path.normpath(path)
        total = sum(self._written.values()) - self._written.get(name, 0) + len(data)
        if total > self.max_total:
            raise JailError(f"at most {self.max_total} bytes can be written in all, this would make {total}")
        # Folders on the way may have to be made; counted before, so that the limit holds whatever is there.
        new = name not in self._written
        if new and len(self._written) + self._folders + 1 + name.count("/") > self.max_files:
            raise JailError(f"at most {self.max_files} files and folders can be made")
        self._folders += jail.write(path, data)
        self._written[name] = len(data)
        return f"wrote {len(text)} characters to {name}"

    def _search(self, path: str, text: str) -> str:
        if not text:
            raise JailError("give the text to search for")
        jail, wanted = self._opened(), text.casefold()
        matches: list[str] = []
        left, searched, too_many = self.max_searched, 0, False
        for place, entry in enumerate(jail.files(path, MAX_FILES_SEARCHED + 1)):
            too_many = place == MAX_FILES_SEARCHED
            if left <= 0 or too_many or len(matches) > self.max_listed:
                break
            try:
                data, _ = jail.read(entry.path, min(left, self.max_file))
            except JailError:
                continue  # removed or replaced meanwhile
            left, searched = left - len(data), searched + 1
            if b"\0" in data[:1000]:
                continue
            for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
                if wanted in line.casefold():
                    matches.append(f"{entry.path}:{number}: {line.strip()[:200]}")
        lines = matches[: self.max_listed]
        if len(matches) > self.max_listed:
            lines.append(f"[more than {self.max_listed} matches; search for something longer]")
        if left <= 0 or too_many:
            lines.append(f"[stopped after {searched} files, {self.max_searched - left} bytes; search in a folder]")
        return "\n".join(lines) or f"no match in {searched} files"


def _texts(files: Any, what: str) -> dict[str, str]:
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise ConfigError(f"{what} are texts by path, such as {{'a.txt': 'text'}}; got {files!r:.80}")
    for path in files:
        try:
            split(path)
        except JailError as error:
            raise ConfigError(f"{what}: {error}") from error
    return dict(files)
