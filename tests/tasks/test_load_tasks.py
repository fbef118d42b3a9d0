"""Task data in every form it may have, and splits that stay what they are."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, DataError
from agentrl.tasks.dataset import Columns, collect, content_hash, load_tasks, split_rows
from agentrl.tasks.files import TaskFile, read_records

ROWS = [{"prompt": f"{n} + {n}?", "label": str(2 * n), "level": n % 3} for n in range(40)]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[Any], **options: Any) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def save_to_disk(folder: Path, rows: list[Any], shards: int = 2) -> Path:
    """What ``datasets.Dataset.save_to_disk`` writes, as far as it counts."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    step = -(-len(rows) // shards)
    for i, name in enumerate(names):
        table = pyarrow.Table.from_pylist(rows[i * step : (i + 1) * step])
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def test_a_row_has_all_its_columns_or_those_asked_for(tmp_path):
    path = write(tmp_path / "t.jsonl", ROWS)
    row = load_tasks(path)["train"][3]
    assert row == {**ROWS[3], "answer": "6", "task_id": content_hash(["3 + 3?", "6"])}
    assert set(load_tasks(path, columns=["level"])["all"][0]) == {"prompt", "answer", "task_id", "level"}
    assert set(load_tasks(path, columns=())["all"][0]) == {"prompt", "answer", "task_id"}
    assert load_tasks(path, input_key="label", label_key=None, metadata_key="level")["all"][4] | {"task_id": ""} == {
        **ROWS[4], "prompt": "8", "answer": None, "metadata": 1, "task_id": ""}  # fmt: skip


def test_the_same_rows_in_every_format_are_the_same_tasks(tmp_path):
    chat = [[{"role": "system", "content": "Add."}, {"role": "user", "content": row["prompt"]}] for row in ROWS]
    chat[0][0]["name"] = "teacher"  # in Parquet and Arrow, null for all others
    rows = [{**row, "prompt": prompt} for row, prompt in zip(ROWS, chat, strict=True)]
    sources = [
        write(tmp_path / "rows.jsonl", rows),
        write_parquet(tmp_path / "rows.parquet", rows, row_group_size=9),
        save_to_disk(tmp_path / "saved", rows),
        str(tmp_path / "shards" / "*.jsonl"),
        tmp_path / "shards",
        lambda: iter(rows),
    ]
    for i in range(4):
        write(tmp_path / "shards" / f"part-{i}.jsonl", rows[10 * i : 10 * i + 10])
    first = load_tasks(sources[0], test_fraction=0.3)
    assert 0 < len(first["test"]) < len(first["train"]) and [len(row["prompt"][0]) for row in first["all"][:2]] == [
        3,
        2,
    ]
    for source in sources[1:]:
        tasks = load_tasks(source, test_fraction=0.3)
        assert {name: list(rows) for name, rows in tasks.items()} == {n: list(r) for n, r in first.items()}, source


def test_a_dataset_saved_by_the_package_itself(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert [row["level"] for row in load_tasks(tmp_path / "one")["all"]] == [row["level"] for row in ROWS]
    dataset.select(range(30, 40)).shuffle(seed=1).save_to_disk(str(tmp_path / "chosen"))
    assert {row["prompt"] for row in load_tasks(tmp_path / "chosen")["all"]} == {row["prompt"] for row in ROWS[30:]}
    dataset.train_test_split(0.25, seed=0).save_to_disk(str(tmp_path / "both"))
    assert {name: len(rows) for name, rows in load_tasks(tmp_path / "both").items()} == {"train": 30, "test": 10}


def test_ids_are_those_of_stored_runs(tmp_path):
    """Written down from version 0.1: a stored run is gone on with, and compared, by these."""
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "naïve 你好?"}]
    rows = [("What is 2+2?", "4"), ("a", ["x", "y"]), ("b", 1), ("c", 0.5), ("d", None), ("e", "2020-01-01")]
    rows += [(chat, "7"), ("What is 2+2?", "4"), ("f", True), ("g", 2**70)]
    path = write(tmp_path / "t.jsonl", [{"prompt": prompt, "label": label} for prompt, label in rows])
    literals = [
        "43e299ab1f84cc04", "d6817b573fa0dd06", "261e7f1f224f2bc0", "1556ef8c440690fb", "5370e51da8cb9c0c",
        "847250a4a5e99638", "9f483f818c040bf0", "43e299ab1f84cc04-2", "7b5ef72f13365f3b", "e6f84490bc073be1",
    ]  # fmt: skip
    for streaming in (False, True):
        tasks = load_tasks(path, test_fraction=0.4, streaming=streaming, cache_dir=tmp_path / "cache")
        assert [row["task_id"] for row in tasks["all"]] == literals
        assert [row["prompt"] for row in tasks["test"]] == ["What is 2+2?", "d", "What is 2+2?", "f"]


def test_splits_that_the_data_has_are_kept(tmp_path):
    for name, rows in (("train", ROWS[:30]), ("validation", ROWS[30:])):
        save_to_disk(tmp_path / "saved" / name, rows)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    tasks = load_tasks(tmp_path / "saved")
    assert {name: len(rows) for name, rows in tasks.items()} == {"train": 30, "validation": 10}
    assert [row["prompt"] for row in tasks["validation"]] == [row["prompt"] for row in ROWS[30:]]
    assert len(load_tasks(tmp_path / "saved" / "validation")["all"]) == 10
    carved = load_tasks(tmp_path / "saved", test_fraction=0.3)
    assert len(carved["train"]) + len(carved["test"]) == 30 and len(carved["validation"]) == 10
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "gone"]}')
    with pytest.raises(DataError, match="gone.*state.json cannot be read"):
        load_tasks(tmp_path / "saved")


def test_shards_named_for_splits_are_those_splits(tmp_path, caplog):
    folder = tmp_path / "named"
    write(folder / "test-00000-of-00001.jsonl", ROWS[:5])
    write(folder / "train-00000-of-00002.jsonl", ROWS[4:20])
    write(folder / "train-00001-of-00002.jsonl", ROWS[20:])
    tasks = load_tasks(folder)
    assert {name: len(rows) for name, rows in tasks.items()} == {"train": 36, "test": 5}
    assert "1 of the 5 rows of split 'test' stand in 'train' too" in caplog.text
    with pytest.raises(ConfigError, match="the data has train, test of its own"):
        load_tasks(folder, test_fraction=0.1)
    write(folder / "more.jsonl", ROWS[:1])
    with pytest.raises(DataError, match="'more.jsonl': it is not clear what is held out"):
        load_tasks(folder)
    below = tmp_path / "below"
    write(below / "dev" / "a.jsonl", ROWS[:2])
    write(below / "train" / "a.jsonl", ROWS[2:])
    assert list(load_tasks(below)) == ["train", "validation"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["gsm8k-train.jsonl", "gsm8k-test.jsonl"], {"train": 10, "test": 10}),
        (["Train.jsonl", "DEV.jsonl", "math_test_hard.jsonl"], {"train": 10, "validation": 10, "test": 10}),
        (["train-1.jsonl", "train-2.jsonl"], {"train": 20, "test": 0, "all": 20}),
        (["latest.jsonl", "contest-2.jsonl"], {"train": 20, "test": 0, "all": 20}),
    ],
)
def test_which_names_are_splits(names, splits, tmp_path):
    for number, name in enumerate(names):
        write(tmp_path / "d" / name, ROWS[10 * number : 10 * number + 10])
    for source in (tmp_path / "d", f"{tmp_path}/d/*.jsonl"):
        assert {name: len(rows) for name, rows in load_tasks(source).items()} == splits


SOURCES = """
def rows():
    yield "Plain?"
    yield "Pair?", "yes"
    yield {"prompt": "Dict?", "label": "yes", "level": 3}

def by_split(split, seed):
    for n in range(5 if split == "train" else 2):
        yield f"{split} {n} {seed}", str(n)

def bad():
    yield "good", "x"
    yield 3

def greedy(path):
    yield path

class Thing:
    pass
"""


def test_a_function_makes_rows(tmp_path):
    (tmp_path / "made.py").write_text(SOURCES)
    rows = load_tasks(f"{tmp_path}/made.py:rows")["train"]
    assert [(row["prompt"], row["answer"]) for row in rows] == [("Plain?", None), ("Pair?", "yes"), ("Dict?", "yes")]
    assert rows[2]["level"] == 3
    tasks = load_tasks(f"{tmp_path}/made.py:by_split", seed=7)
    assert {name: len(rows) for name, rows in tasks.items()} == {"train": 5, "test": 2}
    assert tasks["test"][1]["prompt"] == "test 1 7"
    with pytest.raises(DataError, match="bad, row 2: expected a dict, .* got int"):
        load_tasks(f"{tmp_path}/made.py:bad")
    with pytest.raises(ConfigError, match="greedy needs 'path'; it is given `split` and `seed` only"):
        load_tasks(f"{tmp_path}/made.py:greedy")
    with pytest.raises(ConfigError, match="has no 'by_spilt'. Did you mean 'by_split'"):
        load_tasks(f"{tmp_path}/made.py:by_spilt")
    with pytest.raises(DataError, match="must yield rows, it returned Thing"):
        load_tasks(f"{tmp_path}/made.py:Thing")
    with pytest.raises(DataError, match="the task function .*<lambda> holds no rows"):
        load_tasks(lambda: [])


def test_what_is_not_task_data_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="a folder without task files"):
        load_tasks(tmp_path / "empty")
    with pytest.raises(DataError, match="no file matches"):
        load_tasks(tmp_path / "*.jsonl")
    (tmp_path / "rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match="is packed.*Unpack it"):
        load_tasks(tmp_path / "rows.jsonl.gz")
    saved = save_to_disk(tmp_path / "saved", ROWS)
    torn = saved / "data-00001-of-00002.arrow"
    torn.write_bytes(torn.read_bytes()[:700])
    with pytest.raises(DataError, match="not a readable Arrow file"):
        load_tasks(saved)
    torn.unlink()
    with pytest.raises(DataError, match="is not whole: data-00001-of-00002.arrow is missing"):
        load_tasks(saved)
    (saved / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(DataError, match="flatten_indices"):
        load_tasks(saved)
    with pytest.raises(DataError, match="empty cannot be read: Is a directory"):
        list(read_records(TaskFile(str(tmp_path / "empty"), "jsonl")))
    path = write_parquet(tmp_path / "t.parquet", ROWS)
    with pytest.raises(DataError, match="row 1: no key 'q'; the row has 'prompt', 'label', 'level'. Set --input-key"):
        load_tasks(path, input_key="q", columns=())


@pytest.mark.parametrize("missing", ["pyarrow", "datasets"])
def test_lines_need_no_package_and_the_rest_says_which(tmp_path, monkeypatch, missing):
    """The light install reads JSON Lines; what is heavy is an extra."""
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None if name.startswith(missing) else sys.modules.get(name))
    path = write(tmp_path / "t.jsonl", ROWS)
    assert len(load_tasks(path)["train"]) == 40
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    needs = {"pyarrow": (tmp_path / "t.parquet", False), "datasets": (path, True)}[missing]
    with pytest.raises(ConfigError, match=f"reading .* needs the package {missing}: pip install .*\\[data\\]"):
        load_tasks(needs[0], streaming=needs[1], cache_dir=tmp_path / "cache")


# -- splits ----------------------------------------------------------------------------------------

PROMPTS = st.text(max_size=4).filter(str.strip)
SOME_ROWS = st.lists(st.tuples(PROMPTS, st.text(max_size=2)), min_size=1, max_size=40)


def split(pairs, fraction):
    records = ((None, f"row {n}", {"prompt": prompt, "label": label}) for n, (prompt, label) in enumerate(pairs))
    return split_rows(collect(records, Columns(), "test"), fraction)


def content(rows):
    return sorted((row["prompt"], row["answer"]) for row in rows)


@given(SOME_ROWS, st.floats(0, 1))
@settings(deadline=None)
def test_splits_are_disjoint_and_exhaustive(pairs, fraction):
    tasks = split(pairs, fraction)
    assert sorted(content(tasks["train"]) + content(tasks["test"])) == sorted(pairs) == content(tasks["all"])
    assert not {row["prompt"] for row in tasks["train"]} & {row["prompt"] for row in tasks["test"]}
    assert len({row["task_id"] for row in tasks["all"]}) == len(pairs)
    if fraction in (0, 1):
        assert not tasks["test" if fraction == 0 else "train"]


@given(SOME_ROWS, SOME_ROWS, st.floats(0, 1), st.integers(0, 9))
@settings(deadline=None)
def test_splits_stay_when_rows_are_added_and_reordered(pairs, more, fraction, seed):
    before = split(pairs, fraction)
    both = [*pairs, *more]
    random.Random(seed).shuffle(both)
    after = split(both, fraction)
    for name in ("train", "test"):
        assert set(content(before[name])) <= set(content(after[name]))
    ids = {row["task_id"]: (row["prompt"], row["answer"]) for row in after["all"]}
    assert all(ids[row["task_id"]] == (row["prompt"], row["answer"]) for row in before["all"])


@given(SOME_ROWS, st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_a_larger_share_takes_nothing_back(pairs, one, other):
    small, large = sorted((one, other))
    assert set(content(split(pairs, small)["test"])) <= set(content(split(pairs, large)["test"]))
