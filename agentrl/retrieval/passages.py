"""``Passage``: what retrieval gives."""

from __future__ import annotations

from typing import NamedTuple


class Passage(NamedTuple):
    """One retrievable text. ``title`` may be empty."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title in quotes, newline, body: the form that Search-R1's corpora and servers use."""
        return f'"{self.title}"\n{self.text}'
