"""What is held against what, when an evaluation is gone on with or compared."""

import json
import sys

import pytest

from agentrl.errors import ConfigError
from agentrl.evaluation.record import PROMPT_ENV, content, data_digest, refuse_other


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_text(json.dumps({"prompt": f"{number}?", "label": "1"}) + "\n")
    return folder


def test_a_folder_and_a_glob_count_with_each_file(shards):
    for named in (str(shards), f"{shards}/part-*.jsonl"):
        before = data_digest({"path": named})
        assert before is not None and before == data_digest({"path": named})
        last = shards / "part-2.jsonl"
        last.write_text(last.read_text().replace("2?", "3?"))
        assert data_digest({"path": named}) != before
        last.write_text(last.read_text().replace("3?", "2?"))
        assert data_digest({"path": named}) == before


def test_functions_count_by_their_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "of_this_test.py"
    file.write_text("def sums():\n    yield '1 + 1?', '2'\n")
    __import__("of_this_test")
    for values in (
        {"path": "of_this_test:sums"},
        {"path": f"{file}:sums"},
        {"reward": [[0.5, "f1"], [0.5, "of_this_test:sums"]]},
    ):
        before = data_digest(values)
        assert before is not None
        file.write_text(file.read_text() + "#")
        assert data_digest(values) != before
    del sys.modules["of_this_test"]


def test_what_names_no_data_has_no_digest(tmp_path):
    (tmp_path / "empty").mkdir()
    for value in ("exact_match", "What is this?", "no/such/*.jsonl", str(tmp_path / "empty"), "a:b", 3, None, ["f1"]):
        assert data_digest({"x": value}) is None


def test_how_data_is_read_may_change():
    def described(env, **args):
        return {"sets": {"sums": {"env": env, "env_args": {"reward": "f1", **args}}}}

    read_otherwise = described(PROMPT_ENV, path="moved", streaming=True, workers=4, cache_dir="c")
    refuse_other(described(PROMPT_ENV), read_otherwise, "out")
    assert content(read_otherwise["sets"]["sums"]) == described(PROMPT_ENV)["sets"]["sums"]
    with pytest.raises(ConfigError, match="env_args/workers: was None, is 4"):
        refuse_other(described("own.py:Env"), described("own.py:Env", workers=4), "out")
