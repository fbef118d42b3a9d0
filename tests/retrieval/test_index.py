from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import ConfigError, DataError
from agentrl.retrieval import MemoryIndex, Passage, bm25, open_index
from agentrl.retrieval.corpus import scan
from agentrl.retrieval.dense import open_dense_index, sentence_encoder


def titles(hits) -> list[str]:
    return [hit.passage.title for hit in hits]


def test_best_match_comes_first_and_unrelated_passages_never():
    passages = [Passage("0", "A", "red red apple"), Passage("1", "B", "red pear"), Passage("2", "C", "blue sky")]
    (hits,) = MemoryIndex(passages).search(["red"], 3)
    assert titles(hits) == ["A", "B"]
    assert hits[0].score > hits[1].score > 0


def test_equal_scores_come_in_corpus_order():
    passages = [Passage(str(i), f"T{i}", "same words") for i in range(50)]
    (hits,) = MemoryIndex(passages).search(["same"], 7)
    assert titles(hits) == [f"T{i}" for i in range(7)]


@pytest.mark.parametrize("query", ["", "   ", "zzz", "the of and", "?!", "\x00\ud800", "word " * 5000])
def test_any_query_is_answered(query: str):
    assert len(MemoryIndex([Passage("0", "", "a word or two")]).search([query], 5)) == 1


def test_corpus_on_disk_in_both_forms(corpus: Path):
    found = open_index(corpus)
    assert len(found) == 3
    (egypt,), (norway,) = found.search(["river Egypt", "capital of Norway"], 1)
    assert egypt.passage == Passage("n", "Nile", "The Nile is a river in Egypt.")
    assert norway.passage.contents == '"Oslo"\nOslo is the capital of Norway. Oslo lies on a fjord.'


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_no_file_stays_open(corpus: Path):
    found = open_index(corpus)
    assert titles(found.search(["river Egypt"], 1)[0]) == ["Nile"]
    del found
    gc.collect()


def test_the_index_is_built_once_and_again_when_the_corpus_changes(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    built = []
    build = bm25.build_index
    monkeypatch.setattr(bm25, "build_index", lambda *paths: (built.append(paths), build(*paths)))
    open_index(corpus)
    open_index(corpus)
    assert len(built) == 1
    corpus.write_text('{"contents": "\\"Rhine\\"\\nThe Rhine is a river."}\n', encoding="utf-8")
    os.utime(corpus, ns=(1, 1))
    assert titles(open_index(corpus).search(["river"], 5)[0]) == ["Rhine"]
    assert len(built) == 2
    assert sorted(p.name for p in corpus.parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.bm25"]


def test_on_disk_and_in_memory_agree(corpus: Path):
    """The same passages in the same order; the scores are of two libraries."""
    on_disk, memory = open_index(corpus), MemoryIndex([passage for passage, _, _ in scan(corpus)])
    for query in ("river", "Oslo fjord", "Black Sea river", "river river Egypt"):
        found, expected = on_disk.search([query], 3)[0], memory.search([query], 3)[0]
        assert [hit.passage for hit in found] == [hit.passage for hit in expected]
        scores = [hit.score for hit in found]
        assert scores == sorted(scores, reverse=True) and scores[-1] > 0


@pytest.mark.parametrize("query", ["", "zzz", "the of and", "\x00\ud800", "title:river (", "river " * 5000, "a1 " * 9])
def test_a_query_is_words_and_nothing_else(corpus: Path, query: str):
    assert len(open_index(corpus).search([query], 5)[0]) in ((2,) if "river" in query else (0,))


def test_text_that_is_no_utf8_is_kept(write_jsonl):
    (hits,) = open_index(write_jsonl([{"contents": "odd \ud800 word"}, {"contents": "other"}])).search(["odd"], 1)
    assert hits[0].passage.text == "odd \ud800 word"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "corpus.jsonl:2: "),
        ('["a"]', "corpus.jsonl:2: expected a JSON object, got list"),
        ('{"id": 1, "body": "x"}', r"corpus.jsonl:2: expected a string under \"contents\" or \"text\", got the keys"),
        ('{"contents": 3}', "corpus.jsonl:2: expected a string"),
    ],
)
def test_a_bad_line_is_named(write_jsonl, bad: str, message: str):
    with pytest.raises(DataError, match=message):
        open_index(write_jsonl([{"contents": "good"}, bad]))


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"contents": "a"}\n{"contents": "\xff"}\n')
    with pytest.raises(DataError, match="c.jsonl:2: "):
        open_index(path)
    assert list(tmp_path.iterdir()) == [path]


def test_missing_empty_and_foreign_files(tmp_path: Path, corpus: Path, write_jsonl):
    with pytest.raises(DataError, match="No such file"):
        open_index(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no passage in the file"):
        open_index(write_jsonl([], "empty.jsonl"))
    with pytest.raises(DataError, match="not a BM25 index of ours"):
        (tmp_path / "mine").mkdir()
        open_index(corpus, tmp_path / "mine")


def test_many_threads_read_one_index(corpus: Path):
    found = open_index(corpus)
    wrong = []

    def ask() -> None:
        for _ in range(50):
            if titles(found.search(["Danube"], 1)[0]) != ["Danube"]:
                wrong.append(1)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not wrong


def letters(texts: list[str]) -> np.ndarray:
    """An encoder for tests: counts of letters, as unit vectors."""
    counts = np.array([[text.lower().count(c) for c in "abcdefghijklmnopqrstuvwxyz"] for text in texts], float)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_dense_index_finds_the_nearest_and_is_encoded_once(corpus: Path, tmp_path: Path):
    encoded = []

    def encoder(texts: list[str]) -> np.ndarray:
        encoded.extend(texts)
        return letters(texts)

    first = open_dense_index(corpus, tmp_path / "dense", encoder, passage_prefix="passage: ", batch_size=2)
    assert len(encoded) == 3 and encoded[0].startswith("passage: Nile\n")
    (hits,) = first.search(["Oslo is the capital of Norway. Oslo lies on a fjord."], 2)
    assert titles(hits)[0] == "Oslo" and hits[0].score >= hits[1].score
    open_dense_index(corpus, tmp_path / "dense", encoder, passage_prefix="passage: ")
    assert len(encoded) == 4  # the query only
    with pytest.raises(DataError, match="another corpus"):
        open_dense_index(corpus, tmp_path / "dense", encoder, passage_prefix="")


def test_an_encoder_with_a_wrong_shape_is_named(corpus: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"shape \(3,\) for 3 texts"):
        open_dense_index(corpus, tmp_path / "dense", lambda texts: np.ones(len(texts)))
    assert not list((tmp_path / "dense").iterdir())


def test_the_dense_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match="pip install sentence-transformers"):
        sentence_encoder("some/model")
