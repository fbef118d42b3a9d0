"""``agentrl serve-retriever``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from agentrl.config.layers import load_options
from agentrl.config.options import PathText, Range
from agentrl.config.schema import Count, Positive
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.retrieval import Index


@dataclass(frozen=True, kw_only=True)
class Options:
    """Retriever"""

    corpus: PathText | None = None
    """Passages as JSONL, one a line (`id`, `contents` or `title` and `text`). Without it: the embedded synthetic
    world."""
    index_dir: PathText | None = None
    """Folder of the index, built on the first start; default beside the corpus."""
    dense_model: str | None = None
    """A sentence-transformers model, for dense vectors in place of BM25."""
    topk: Positive = 3
    """Passages per query when the request names no number."""
    host: str = "127.0.0.1"
    """Address to listen on. Other than loopback it needs a key in the environment variable AGENTRL_RETRIEVER_KEY."""
    port: Annotated[int, Range(low=0, high=65535)] = 8000
    """Port; 0 takes a free one, which is printed."""
    world_seed: Count = 0
    """Which synthetic world, when there is no corpus."""


def run(argv: Sequence[str]) -> int:
    """Serve until interrupted; returns the exit code."""
    given = load_options(Options, argv)
    from agentrl.retrieval.server import serve

    serve(lambda: index_of(given), given.host, given.port, topk=given.topk)
    return 0


def index_of(given: Options) -> Index:
    """What the options ask to serve.
    Raises ConfigError: a dense index without a corpus.
    Raises DataError: a bad corpus; file and line are named."""
    if given.corpus is None:
        if given.dense_model:
            raise ConfigError("a dense index needs a corpus: give a JSONL file")
        from agentrl.envs.builtin.search.world import world_index

        return world_index(given.world_seed)
    from agentrl.retrieval import open_index
    from agentrl.retrieval.dense import open_dense_index, sentence_encoder

    if given.dense_model is None:
        return open_index(given.corpus, given.index_dir)
    encoder = sentence_encoder(given.dense_model)
    return open_dense_index(given.corpus, given.index_dir or f"{given.corpus}.dense", encoder)
