"""BM25 over passages: by bm25s in memory, by tantivy on disk, where an index of millions of passages opens at once."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from agentrl.errors import DataError
from agentrl.jsonl import read_json
from agentrl.retrieval.corpus import Passage, scan
from agentrl.versions import imported

log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the index directory's layout; another one is rebuilt."""
_IDENTITY = "agentrl.json"
_WORD = re.compile(r"\w+")
_BUFFER = 128 << 20
"""Bytes of the index that are in memory while it is built."""


class Hit(NamedTuple):
    """A retrieved passage. A higher score is a better match; scores of different queries do not compare."""

    passage: Passage
    score: float


class Index(Protocol):
    """What retrieves: BM25 here, dense vectors in :mod:`agentrl.retrieval.dense`."""

    def __len__(self) -> int: ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first. Passages that share no term with the query are never returned
        by BM25. Safe to call from several threads."""
        ...


@functools.lru_cache(maxsize=1)
def _stopwords() -> frozenset[str]:
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)


def words(text: str) -> list[str]:
    """The terms of a text: lower-cased runs of letters and digits, without English stop words."""
    stopwords = _stopwords()
    return [word for word in _WORD.findall(text.lower()) if word not in stopwords]


def _words_of(passage: Passage) -> list[str]:
    return words(passage.text if passage.text.startswith(passage.title) else f"{passage.title} {passage.text}")


class MemoryIndex:
    """BM25 (Lucene's variant, k1 1.5, b 0.75) over passages in memory; equal scores come in their order."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        import bm25s

        vocabulary: dict[str, int] = {}
        ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in _words_of(passage)] for passage in passages]
        self._bm25 = bm25s.BM25(k1=1.5, b=0.75)
        self._bm25.index((ids, vocabulary), show_progress=False)
        self._passages = passages

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        ids = self._bm25.get_tokens_ids(words(query))
        if not ids or topk < 1:
            return []
        scores = self._bm25.get_scores_from_ids(ids)
        # Few passages share a term with the query, so what is sorted is small however large the corpus is.
        candidates = np.flatnonzero(scores > 0)
        if topk < len(candidates):
            found = scores[candidates]
            candidates = candidates[found >= np.partition(found, -topk)[-topk]]
        order = np.argsort(-scores[candidates], kind="stable")[:topk]
        return [Hit(self._passages[int(i)], float(scores[i])) for i in candidates[order]]


class DiskIndex:
    """BM25 (k1 1.2, b 0.75) over an index of :func:`build_index`, which holds the passages too."""

    def __init__(self, directory: Path) -> None:
        self._index = _tantivy().Index.open(str(directory))
        self._searcher = self._index.searcher()

    def __len__(self) -> int:
        return self._searcher.num_docs

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        tantivy, terms = _tantivy(), Counter(words(query))
        if not terms or topk < 1:
            return []
        parts = []
        for word, count in terms.items():
            term = tantivy.Query.term_query(self._index.schema, "words", word, index_option="freq")
            parts.append((tantivy.Occur.Should, tantivy.Query.boost_query(term, float(count))))
        found = self._searcher.search(tantivy.Query.boolean_query(parts), topk, count=False).hits
        return [Hit(Passage(*json.loads(self._searcher.doc(at)["passage"][0])), float(score)) for score, at in found]


def open_index(corpus: str | Path, index_dir: str | Path | None = None) -> DiskIndex:
    """The BM25 index of a JSONL corpus, built first where it is missing or older than the corpus.

    Args:
        corpus: JSONL, one passage a line (see :func:`~agentrl.retrieval.corpus.parse_passage`).
        index_dir: where the index is kept; default ``<corpus>.bm25``.

    Raises:
        DataError: the corpus is missing, empty or has a bad line (named), or the directory is not an index.
        ConfigError: the package tantivy is not installed.
    """
    path = Path(corpus)
    directory = Path(index_dir) if index_dir else path.with_name(path.name + ".bm25")
    _tantivy()
    if _stored_identity(directory) != _identity(path):
        build_index(path, directory)
    return DiskIndex(directory)


def build_index(corpus: str | Path, index_dir: str | Path) -> None:
    """Build the index of a JSONL corpus in ``index_dir``, which appears only when it is complete.

    Takes a few hundred MB of memory however long the corpus is. Errors as of :func:`open_index`.
    """
    tantivy, path, directory = _tantivy(), Path(corpus), Path(index_dir)
    identity = _identity(path)
    log.info("building a BM25 index of %s in %s", path, directory)
    partial = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        schema = tantivy.SchemaBuilder().add_text_field("words", tokenizer_name="whitespace", index_option="freq")
        index = tantivy.Index(schema.add_bytes_field("passage", stored=True).build(), str(partial))
        writer = index.writer(heap_size=_BUFFER, num_threads=1)
        try:
            for passage, _, _ in scan(path):
                stored = json.dumps(passage).encode()
                writer.add_document(tantivy.Document(words=" ".join(_words_of(passage)), passage=stored))
            writer.commit()
        finally:
            writer.wait_merging_threads()  # until then it writes into the folder
        (partial / _IDENTITY).write_text(json.dumps(identity), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)  # of the corpus as it was
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tantivy() -> Any:
    return imported("tantivy", "a corpus on disk", "retriever")


def _identity(corpus: Path) -> dict[str, Any]:
    try:
        stat = corpus.stat()
    except OSError as error:
        raise DataError(f"cannot read the corpus {corpus}: {error.strerror}; expected a JSONL file") from error
    return {"format": FORMAT, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _stored_identity(directory: Path) -> dict[str, Any] | None:
    if not directory.exists():
        return None
    try:
        return read_json(directory / _IDENTITY)
    except DataError as error:
        raise DataError(
            f"{directory} exists and is not a BM25 index of ours ({error}); give another index directory or remove it"
        ) from error
