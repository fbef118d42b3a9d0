"""A small corpus, as the tests of retrieval have it."""

from tests.retrieval.conftest import corpus, write_jsonl

__all__ = ["corpus", "write_jsonl"]
