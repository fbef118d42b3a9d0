"""Google-style docstrings, of which the model reads the description and the arguments."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Attributes|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$"
)
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Splits a Google-style docstring into the text before the sections and the entries of ``Args:``."""
    text: list[str] = []
    entries: dict[str, str] = {}
    section, indent, current = "", 0, ""
    for line in inspect.cleandoc(doc).splitlines():
        header = _SECTION.match(line)
        if header:
            section, indent, current = header.group(1), 0, ""
        elif not section:
            text.append(line)
        elif section in ("Args", "Arguments", "Parameters", "Attributes") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ENTRY.match(line.strip()) if depth <= indent else None
            if entry:
                current = entry.group(1)
                entries[current] = entry.group(2).strip()
            elif current:
                entries[current] = f"{entries[current]} {line.strip()}".strip()
    return "\n".join(text).strip(), entries
