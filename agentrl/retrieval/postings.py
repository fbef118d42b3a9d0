"""BM25 postings for bm25s, built in bounded memory.

bm25s' own builder holds about 60 bytes a word of the corpus in memory. This one sorts the corpus a chunk at a time
and scatters the chunks into the final arrays, which may be files; the arrays are what bm25s' builder
gives for its default variant (Lucene's, k1 1.5, b 0.75), and bm25s saves, loads and searches them.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

K1 = 1.5
B = 0.75
CHUNK_TERMS = 4_000_000
"""Terms sorted at once: about 200 MB while a chunk is sorted."""


class PostingsBuilder:
    """Takes passages as lists of term ids, in order; gives the arrays of a bm25s index.

    Args:
        directory: where chunks and arrays are kept while building; None keeps them in memory.
        chunk_terms: terms sorted at once.
    """

    def __init__(self, directory: Path | None = None, *, chunk_terms: int = CHUNK_TERMS) -> None:
        self._directory = directory
        self._chunk_terms = chunk_terms
        self._terms = array("i")
        self._lengths = array("i")
        self._chunks: list[Any] = []
        self._frequencies = np.zeros(0, dtype=np.int64)
        self._first_in_chunk = 0

    def add(self, terms: list[int]) -> None:
        """The next passage."""
        self._terms.extend(terms)
        self._lengths.append(len(terms))
        if len(self._terms) >= self._chunk_terms:
            self._sort_chunk()

    def _sort_chunk(self) -> None:
        """Keep the pending terms as (term, passage, count), sorted by term, then passage."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32)[self._first_in_chunk :]
        passages = np.repeat(np.arange(self._first_in_chunk, self._first_in_chunk + len(lengths)), lengths)
        keys = (np.frombuffer(self._terms, dtype=np.int32).astype(np.int64) << 32) | passages
        keys, counts = np.unique(keys, return_counts=True)
        frequencies = np.bincount(keys >> 32)
        if len(frequencies) > len(self._frequencies):
            self._frequencies = np.pad(self._frequencies, (0, len(frequencies) - len(self._frequencies)))
        self._frequencies[: len(frequencies)] += frequencies
        self._chunks.append(self._kept(f"chunk{len(self._chunks)}", (keys, counts.astype(np.int32))))
        self._terms = array("i")
        self._first_in_chunk += len(lengths)

    def _kept(self, name: str, arrays: tuple[np.ndarray, np.ndarray]) -> Any:
        if self._directory is None:
            return arrays
        for part, values in zip(("keys", "counts"), arrays, strict=True):
            np.save(self._directory / f"{name}-{part}.npy", values)
        return name

    def _load(self, chunk: Any) -> tuple[np.ndarray, np.ndarray]:
        if self._directory is None:
            return chunk
        return tuple(np.load(self._directory / f"{chunk}-{part}.npy", mmap_mode="r") for part in ("keys", "counts"))

    def _empty(self, name: str, size: int, dtype: type) -> np.ndarray:
        if self._directory is None or size == 0:
            return np.empty(size, dtype=dtype)
        return np.lib.format.open_memmap(self._directory / f"{name}.npy", mode="w+", dtype=dtype, shape=(size,))

    def finish(self, num_terms: int) -> dict[str, Any]:
        """The ``scores`` of a bm25s index over ``num_terms`` terms: a column a term, a row a passage."""
        self._sort_chunk()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        num_passages = len(lengths)
        frequencies = np.pad(self._frequencies, (0, num_terms - len(self._frequencies)))
        # Robertson and Zaragoza 2009, eq. 3.15, with Lucene's idf and without the constant factor k1 + 1.
        idf = np.log(1 + (num_passages - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
        norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1e-9))
        indptr = np.zeros(num_terms + 1, dtype=np.int64)
        np.cumsum(frequencies, out=indptr[1:])
        data = self._empty("data", int(indptr[-1]), np.float32)
        indices = self._empty("indices", int(indptr[-1]), np.int32)
        heads = indptr[:-1].copy()
        for chunk in self._chunks:
            keys, counts = self._load(chunk)
            terms, passages = keys >> 32, (keys & 0xFFFFFFFF).astype(np.int32)
            in_chunk = np.bincount(terms, minlength=num_terms)
            starts = np.cumsum(in_chunk) - in_chunk
            places = (heads - starts)[terms] + np.arange(len(terms))
            data[places] = idf[terms] * (counts / (norms[passages] + counts)).astype(np.float32)
            indices[places] = passages
            heads += in_chunk
        return {"data": data, "indices": indices, "indptr": indptr, "num_docs": num_passages}
