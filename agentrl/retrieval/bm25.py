"""BM25 over passages, by the bm25s library: in memory, or on disk over a JSONL corpus.

On disk the postings and the corpus are memory-mapped, so opening an index of millions of passages takes
seconds and the pages that queries touch are all that is resident.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from agentrl.errors import DataError
from agentrl.retrieval.corpus import JsonlCorpus, scan
from agentrl.retrieval.passages import Passage
from agentrl.retrieval.postings import K1, B, PostingsBuilder

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the index directory's layout; another one is rebuilt."""

_WORD = re.compile(r"\w+")


class Hit(NamedTuple):
    """A retrieved passage. A higher score is a better match; scores of different queries do not compare."""

    passage: Passage
    score: float


class Index(Protocol):
    """What retrieves: BM25 here, dense vectors in :mod:`agentrl.retrieval.dense`."""

    def __len__(self) -> int: ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first."""
        ...


@functools.lru_cache(maxsize=1)
def _stopwords() -> frozenset[str]:
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)


def words(text: str) -> list[str]:
    """The terms of a text: lower-cased runs of letters and digits, without English stop words."""
    stopwords = _stopwords()
    return [word for word in _WORD.findall(text.lower()) if word not in stopwords]


class Bm25Index:
    """BM25 (Lucene's variant, k1 1.5, b 0.75) over a sequence of passages.

    Args:
        bm25: a bm25s index whose document i is ``passages[i]``.
        passages: anything with ``len`` and indexing.
    """

    def __init__(self, bm25: Any, passages: Sequence[Passage]) -> None:
        self._bm25 = bm25
        self._passages = passages

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first; equal scores in corpus order. Passages that share no
        term with the query are never returned. Safe to call from several threads."""
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


class _Builder:
    """A bm25s index from passages, one after another."""

    def __init__(self, directory: Path | None = None) -> None:
        self._vocabulary: dict[str, int] = {}
        self._postings = PostingsBuilder(directory)

    def add(self, passage: Passage) -> None:
        text = passage.text if passage.text.startswith(passage.title) else f"{passage.title} {passage.text}"
        vocabulary = self._vocabulary
        self._postings.add([vocabulary.setdefault(word, len(vocabulary)) for word in words(text)])

    def finish(self) -> Any:
        import bm25s

        bm25 = bm25s.BM25(k1=K1, b=B)
        self._vocabulary.setdefault("", len(self._vocabulary))
        bm25.nonoccurrence_array = None  # this variant has none
        bm25.scores = self._postings.finish(len(self._vocabulary))
        bm25.vocab_dict = self._vocabulary
        bm25.unique_token_ids_set = set(self._vocabulary.values())
        return bm25


def build_in_memory(passages: Sequence[Passage]) -> Bm25Index:
    """Index passages that fit in memory."""
    builder = _Builder()
    for passage in passages:
        builder.add(passage)
    return Bm25Index(builder.finish(), passages)


def open_index(corpus: str | Path, index_dir: str | Path | None = None) -> Bm25Index:
    """The BM25 index of a JSONL corpus, built first where it is missing or older than the corpus.

    Args:
        corpus: JSONL, one passage a line (see :class:`JsonlCorpus`).
        index_dir: where the index is kept; default ``<corpus>.bm25``.

    Raises:
        DataError: the corpus is missing, empty or has a bad line (named), or the directory is not an index.
    """
    path = Path(corpus)
    directory = Path(index_dir) if index_dir else path.with_name(path.name + ".bm25")
    identity = _identity(path)
    if _stored_identity(directory) != identity:
        build_index(path, directory)
    import bm25s

    bm25 = bm25s.BM25.load(str(directory), mmap=True, load_corpus=False, show_progress=False)
    return Bm25Index(bm25, JsonlCorpus(path, np.load(directory / "offsets.npy", mmap_mode="r")))


def build_index(corpus: str | Path, index_dir: str | Path) -> None:
    """Build the index of a JSONL corpus in ``index_dir``, which appears only when it is complete.

    Takes about 0.1 ms a passage of 100 words, and memory for the vocabulary, 8 bytes a passage and one chunk.

    Raises:
        DataError: as :func:`open_index`.
    """
    path, directory = Path(corpus), Path(index_dir)
    identity = _identity(path)
    log.info("building a BM25 index of %s in %s", path, directory)
    partial = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    replaced = directory.with_name(f"{directory.name}.old-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "work").mkdir(parents=True)
    try:
        builder = _Builder(partial / "work")
        offsets = array("q", [0])
        for passage, end in scan(path):
            builder.add(passage)
            offsets.append(end)
        builder.finish().save(str(partial), show_progress=False)
        shutil.rmtree(partial / "work")
        np.save(partial / "offsets.npy", np.frombuffer(offsets, dtype=np.int64))
        (partial / "meta.json").write_text(json.dumps(identity), encoding="utf-8")
        if directory.exists():
            os.replace(directory, replaced)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


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
        return json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{directory} exists and is not a BM25 index of ours ({error}); give another index directory or remove it"
        ) from error
