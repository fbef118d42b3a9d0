"""Retrieval of passages: BM25 over a corpus in memory or on disk, or a server with Search-R1's HTTP API."""

from agentrl.retrieval.bm25 import Hit, Index, MemoryIndex, open_index
from agentrl.retrieval.corpus import Passage
from agentrl.retrieval.retriever import HttpRetriever, LocalRetriever, Retriever

__all__ = ["Hit", "HttpRetriever", "Index", "LocalRetriever", "MemoryIndex", "Passage", "Retriever", "open_index"]
