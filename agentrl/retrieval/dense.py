"""Exact dense retrieval over a JSONL corpus, with an encoder the user brings.

Vectors are kept in one memory-mapped file and compared in blocks, so memory stays bounded. It is meant for
up to a few million passages; an approximate index can stand behind the same :class:`Index` protocol.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from agentrl.errors import ConfigError, DataError
from agentrl.retrieval.bm25 import Hit
from agentrl.retrieval.corpus import JsonlCorpus

Encoder = Callable[[list[str]], np.ndarray]
"""Texts to vectors ``[texts, dim]``, compared by inner product."""

_BLOCK = 65_536


def sentence_encoder(model: str, *, batch_size: int = 64, device: str | None = None) -> Encoder:
    """An encoder from a sentence-transformers model, unit vectors.
    Raises ConfigError: sentence-transformers is not installed."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError(
            f"the dense encoder {model!r} needs sentence-transformers: pip install sentence-transformers"
        ) from error
    encoder = SentenceTransformer(model, device=device)

    def encode(texts: list[str]) -> np.ndarray:
        return encoder.encode(texts, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False)

    return encode


class DenseIndex:
    """Brute-force inner-product search over ``vectors`` ``[passages, dim]``, memory-mapped or not, by the encoder that
    they were made with. ``query_prefix`` is put before each query (E5 models: ``"query: "``). :func:`open_dense_index`
    builds or opens it."""

    def __init__(self, vectors: np.ndarray, passages: JsonlCorpus, encoder: Encoder, *, query_prefix: str = "") -> None:
        self._vectors = vectors
        self._passages = passages
        self._encoder = encoder
        self._query_prefix = query_prefix

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most ``topk`` hits a query, best first."""
        if not queries or topk < 1:
            return [[] for _ in queries]
        wanted = np.asarray(self._encoder([self._query_prefix + q for q in queries]), dtype=np.float32)
        best_scores = np.empty((len(queries), 0), dtype=np.float32)
        best_rows = np.empty((len(queries), 0), dtype=np.int64)
        for start in range(0, len(self._vectors), _BLOCK):
            block = np.asarray(self._vectors[start : start + _BLOCK], dtype=np.float32)
            scores = np.concatenate([best_scores, wanted @ block.T], axis=1)
            rows = np.arange(start, start + len(block))
            rows = np.concatenate([best_rows, np.broadcast_to(rows, (len(queries), len(block)))], axis=1)
            kept = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
            best_scores = np.take_along_axis(scores, kept, axis=1)
            best_rows = np.take_along_axis(rows, kept, axis=1)
        return [
            [Hit(self._passages[int(row)], float(score)) for row, score in zip(rows, scores, strict=True)]
            for rows, scores in zip(best_rows, best_scores, strict=True)
        ]


def open_dense_index(
    corpus: str | Path,
    index_dir: str | Path,
    encoder: Encoder,
    *,
    query_prefix: str = "",
    passage_prefix: str = "",
    batch_size: int = 512,
) -> DenseIndex:
    """The dense index of a JSONL corpus; the passages are encoded first where that has not been done.

    Args:
        corpus: JSONL, one passage a line (see :class:`JsonlCorpus`).
        index_dir: where ``vectors.npy`` is kept (float16).
        encoder: what turns texts into vectors. Use the same one each time.
        query_prefix: put before each query.
        passage_prefix: put before each passage.
        batch_size: passages given to the encoder at once.

    Raises:
        DataError: a bad corpus (line named), or vectors that belong to another corpus.
    """
    path, directory = Path(corpus), Path(index_dir)
    if not path.is_file():
        raise DataError(f"cannot read the corpus {path}: no such file; expected a JSONL file")
    passages = JsonlCorpus(path)
    meta = {"size": path.stat().st_size, "passages": len(passages), "passage_prefix": passage_prefix}
    meta_path, vectors_path = directory / "dense.json", directory / "vectors.npy"
    if not meta_path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _encode_all(passages, vectors_path, encoder, passage_prefix, batch_size)
        meta_path.write_text(json.dumps(meta), encoding="utf-8")
    elif json.loads(meta_path.read_text(encoding="utf-8")) != meta:
        raise DataError(f"{vectors_path} was made from another corpus than {path}: remove {directory} to encode again")
    return DenseIndex(np.load(vectors_path, mmap_mode="r"), passages, encoder, query_prefix=query_prefix)


def _encode_all(passages: JsonlCorpus, target: Path, encoder: Encoder, prefix: str, batch_size: int) -> None:
    partial = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    vectors: np.memmap | None = None
    try:
        for start in range(0, len(passages), batch_size):
            texts = [
                f"{prefix}{p.title}\n{p.text}" if p.title else prefix + p.text
                for p in (passages[i] for i in range(start, min(start + batch_size, len(passages))))
            ]
            encoded = np.asarray(encoder(texts))
            if encoded.ndim != 2 or len(encoded) != len(texts):
                raise ConfigError(
                    f"the encoder returned an array of shape {encoded.shape} for {len(texts)} texts; "
                    f"expected ({len(texts)}, dim)"
                )
            if vectors is None:
                shape = (len(passages), encoded.shape[1])
                vectors = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float16, shape=shape)
            vectors[start : start + len(texts)] = encoded
        if vectors is not None:
            vectors.flush()
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
