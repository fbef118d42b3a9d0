"""Reads what the documentation shows: fenced blocks, command lines, links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "envs_examples").rglob("*.md"))]

_FENCE = re.compile(r"(?P<mark><!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?)\s*$", re.M)
_INLINE = re.compile(r"`(agentrl [^`\n]+)`")
_COMMAND = re.compile(r"^(?: {4})?(agentrl [a-z](?:.*\\\n)*.*)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block. A comment ``<!-- file: NAME -->`` before it names the file it is the content of."""

    page: Path
    line: int
    language: str
    code: str
    file: str | None
    runs: bool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        note = match["note"] or ""
        file = note.removeprefix("file: ") if note.startswith("file: ") else None
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(page, line, match["language"], match["code"], file, not note.startswith("not run")))
    return found


def command_lines(page: Path) -> list[list[str]]:
    """Commands that stand on lines of their own, in fenced or indented blocks, without comments."""
    text = page.read_text(encoding="utf-8")
    shown = "\n".join(b.code for b in blocks(page) if b.language in ("bash", "sh", "console", ""))
    indented = "\n".join(re.findall(r"(?:^ {4}.*\n?)+", _FENCE.sub("", text), re.M))
    lines = _COMMAND.findall(shown) + _COMMAND.findall(indented)
    words = [shlex.split(line.replace("\\\n", " "), comments=True) for line in lines]
    return [w for w in words if not any("(" in word for word in w)]  # a drawing of processes is no command


def inline_commands(page: Path) -> list[list[str]]:
    """Commands named in running text, in backticks; they may leave out what is needed to run them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [shlex.split(match.replace("[", "").replace("]", "")) for match in _INLINE.findall(text)]


def links(page: Path) -> list[str]:
    """Targets of links that are not on the web."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [m["target"] for m in _LINK.finditer(text) if not re.match(r"\w+://", m["target"])]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)]
    return set(plain)
