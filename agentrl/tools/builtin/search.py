"""``SearchTool``: passages for a query, from an index of this process or from a retrieval server."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.concurrency.threads import run_blocking
from agentrl.errors import ConfigError
from agentrl.retrieval import Hit, HttpRetriever, Index, LocalRetriever, MemoryIndex, Passage, Retriever, open_index
from agentrl.retrieval.corpus import parse_passage
from agentrl.tools.base import Tool, ToolResult
from agentrl.values import check_number

NO_RESULTS = "No results."

_loading = threading.Lock()


def format_passages(passages: Sequence[Passage]) -> str:
    """Search results as the model reads them: one passage a line, the title only where the text does not
    begin with it."""
    lines = []
    for passage in passages:
        text = " ".join(passage.text.split())
        named = not passage.title or text.startswith(passage.title)
        lines.append(f"- {text}" if named else f"- {passage.title}: {text}")
    return "\n".join(lines) or NO_RESULTS


class SearchTool(Tool):
    """Searches a collection of texts.

    Give one source. A corpus file and a server are opened once a process, however many environments ask.
    A server that is away is waited for, then it is an infrastructure error, never the model's. How often a search was
    sent again is its ``metadata["retries"]``.

    Args:
        index: What to search in this process: the path of a JSONL corpus (an object with ``text`` and
            optionally ``title`` and ``id`` a line; its BM25 index is kept beside it), or passages in memory
            (texts, such objects, or :class:`Passage`), or an :class:`Index` of one's own.
        url: A server with Search-R1's ``/retrieve`` API, see :class:`HttpRetriever`.
        patience: Seconds for which a search waits for such a server when it is away.
        retriever: A :class:`Retriever` of one's own.
        topk: Passages a search returns.
        index_dir: Where the index of a corpus file is kept; default ``<corpus>.bm25``.
        show: How passages are written down.
        description: What the model reads about the tool; say what the collection holds.
        name: What the model calls it, where ``search`` will not do.

    Raises:
        ConfigError: No source, two of them, or a ``topk`` below 1.
        DataError: The corpus cannot be used; file and line are named.

    Example:
        >>> nile = {"title": "Nile", "text": "The Nile is a river in Africa."}
        >>> tool = SearchTool(index=[nile, "Lima is the capital of Peru."], topk=1)
        >>> tool.retriever.search(["river"], 1)[0][0].passage.title
        'Nile'
    """

    name = "search"
    description = "Searches a collection of texts."
    shared = True

    def __init__(
        self,
        *,
        index: str | Path | Sequence[Any] | Index | None = None,
        url: str | None = None,
        patience: float = 300.0,
        retriever: Retriever | None = None,
        topk: int = 3,
        index_dir: str | Path | None = None,
        show: Callable[[Sequence[Passage]], str] = format_passages,
        description: str | None = None,
        name: str | None = None,
    ) -> None:
        sources = {"index": index, "url": url, "retriever": retriever}
        given = [option for option, source in sources.items() if source is not None]
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            raise ConfigError(f"a SearchTool searches one source: give index, url or retriever; got {found}")
        check_number("topk", topk, 1)
        if index_dir is not None and not isinstance(index, (str, Path)):
            raise ConfigError(
                f"index_dir={str(index_dir)!r} is where the index of a corpus file is kept: give index=FILE"
            )
        self.retriever = retriever or _opened(index, url, patience, index_dir)
        self.topk = topk
        self.show = show
        if description is not None:
            self.description = description
        if name is not None:
            self.name = name
        # A retriever with a deadline of its own knows whose fault it is when that passes: leave it the time.
        self.timeout = None if self.retriever.patience is None else self.retriever.patience + 5.0

    def prepare(self) -> None:
        """An index that is still to be made is made here."""
        if isinstance(self.retriever, LocalRetriever):
            _ = self.retriever.index

    async def __call__(self, query: str) -> ToolResult:
        """Args:
        query: What to look for.
        """
        hits, retries = self._search(query) if self.retriever.quick else await run_blocking(self._search, query)
        passages = [hit.passage for hit in hits]
        metadata: dict[str, Any] = {"passages": [passage.id for passage in passages]}
        if retries:
            metadata["retries"] = retries
        return ToolResult(self.show(passages), metadata=metadata)

    def _search(self, query: str) -> tuple[list[Hit], int]:
        (hits,) = self.retriever.search([query], self.topk)
        return hits, getattr(self.retriever, "retries", 0)


def open_retriever(
    *,
    url: str | None = None,
    patience: float = 300.0,
    corpus: str | Path | None = None,
    index_dir: str | Path | None = None,
) -> Retriever:
    """The retriever of a server or of a corpus file, one a process for the same settings."""
    with _loading:
        return _open(url, patience, corpus and absolute(corpus), index_dir and absolute(index_dir))


@functools.lru_cache(maxsize=16)
def _open(url: str | None, patience: float, corpus: str | None, index_dir: str | None) -> Retriever:
    return HttpRetriever(url, patience=patience) if url else LocalRetriever(open_index(str(corpus), index_dir))


def absolute(path: str | Path) -> str:
    """What is opened once a process must not mean another file in another working directory."""
    return str(Path(path).absolute())


def _opened(index: Any, url: str | None, patience: float, index_dir: str | Path | None) -> Retriever:
    if url is not None:
        return open_retriever(url=url, patience=patience)
    if isinstance(index, (str, Path)):
        return open_retriever(corpus=index, index_dir=index_dir)
    if isinstance(index, Sequence):
        return LocalRetriever(MemoryIndex([_passage(entry, number) for number, entry in enumerate(index)]))
    return LocalRetriever(index)


def _passage(entry: Any, number: int) -> Passage:
    if isinstance(entry, Passage):
        return entry
    if isinstance(entry, str):
        return Passage(str(number), "", entry)
    try:
        return parse_passage(entry, number)
    except ValueError as error:
        raise ConfigError(f"passage {number} of a SearchTool's index: {error}") from error
