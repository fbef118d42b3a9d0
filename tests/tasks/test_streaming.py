"""Rows on disk are the rows in memory; the index survives what happens to files; memory does not grow with them."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.envs.builtin.prompt import PromptEnv
from agentrl.errors import ConfigError, DataError, StorageError
from agentrl.tasks import dataset, streaming
from agentrl.tasks.dataset import load_tasks

ROOT = Path(__file__).parents[2]


datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache folder of its own, and nothing opened before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def forget():
    streaming.open_files.cache_clear()
    dataset._function_rows.cache_clear()


def cut_small(monkeypatch, least: int) -> None:
    """Files are shared out among processes however small they are."""
    monkeypatch.setattr(streaming, "LEAST_BYTES", least)


def rows(count: int, width: int = 30) -> list[dict]:
    """Some of them equal, some of the prompts with several answers."""
    return [{"prompt": f"{n % (count - 7)} é? " + "x" * (n % width), "label": str(n % 3), "n": n} for n in range(count)]


def write(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\r\n" * (1 + r["n"] % 2) for r in records)
    )
    return path


def write_parquet(path: Path, records: list[dict], **options) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path, **options)
    return path


def write_arrow(path: Path, records: list[dict], make: str) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with getattr(pyarrow.ipc, make)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return path


def source(kind: str, folder: Path) -> Path:
    data = rows(600)
    if kind == "jsonl":
        return write(folder / "rows.jsonl", data)
    if kind == "parquet":
        return write_parquet(folder / "rows.parquet", data, row_group_size=64)
    if kind == "arrow":
        return write_arrow(folder / "rows.arrow", data, "new_file").parent
    if kind == "splits":
        write(folder / "s" / "train-1.jsonl", data[:200])
        write_parquet(folder / "s" / "train-2.parquet", data[200:300])
        write_arrow(folder / "s" / "test-1.arrow", data[280:], "new_stream")
        return folder / "s"
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "splits"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_tasks_as_in_memory(kind, workers, tmp_path, monkeypatch):
    cut_small(monkeypatch, 2000)
    path = source(kind, tmp_path / "data")
    options = {} if kind == "splits" else {"test_fraction": 0.3}
    loaded = load_tasks(path, metadata_key="n", **options)
    streamed = load_tasks(path, metadata_key="n", streaming=True, workers=workers, **options)
    assert list(streamed) == list(loaded) and all(len(part) > 100 for part in loaded.values())
    for name, part in loaded.items():
        assert list(streamed[name]) == list(part)
        assert streamed[name][-1] == part[-1] and list(streamed[name][5:9]) == list(part[5:9])
        assert [row["n"] for row in streamed[name][::-50]] == [row["n"] for row in part[::-50]]
        with pytest.raises(IndexError):
            streamed[name][len(part)]


def test_the_environment_is_the_same(tmp_path):
    path = source("jsonl", tmp_path)
    envs = [PromptEnv(str(path), test_fraction=0.2, streaming=flag, workers=2) for flag in (False, True)]
    for split in ("train", "test", "all"):
        assert len({env.num_tasks(split) for env in envs}) == 1
        for index in (0, 7, 40):
            one, other = (env.reset(options={"split": split, "index": index}) for env in envs)
            assert one == other
    assert envs[1].step("1")[1] == envs[0].step("1")[1]
    with pytest.raises(DataError, match=":1: no key 'gold'; the row has .* Set --label-key"):
        PromptEnv(str(path), label_key="gold", reward="f1", streaming=True)


def test_a_function_is_streamed_too(tmp_path):
    def made(split, seed):
        for n in range(50):
            yield {"prompt": f"{split} {n}", "label": seed, "n": n}

    loaded, streamed = (load_tasks(made, seed=3, streaming=flag) for flag in (False, True))
    assert {k: list(v) for k, v in streamed.items()} == {k: list(v) for k, v in loaded.items()}
    with pytest.raises(DataError, match="row 1: streamed rows must be JSON"):
        load_tasks(lambda: [{"prompt": "a", "label": {1, 2}}], streaming=True)
    with pytest.raises(DataError, match="row 1: no key 'prompt'"):
        load_tasks(lambda: [{"q": "a"}], streaming=True)
    with pytest.raises(DataError, match="yields no rows"):
        load_tasks(lambda: [], streaming=True)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "not JSON: "),
        ("[1]", "expected a JSON object"),
        ('{"q": "a"}', "no key 'prompt'; the row has 'q'"),
    ],
)
def test_a_bad_line_is_named(workers, line, message, tmp_path, monkeypatch):
    cut_small(monkeypatch, 500)
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(700)) + line + "\n" + '{"prompt": "end"}\n')
    with pytest.raises(DataError) as caught:
        load_tasks(path, streaming=True, workers=workers)
    assert str(caught.value).startswith(f"{path}:701: {message}")
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_other_bad_input(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_tasks(tmp_path / "empty.jsonl", streaming=True)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a readable Parquet"):
        load_tasks(tmp_path / "bad.parquet", streaming=True)
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        load_tasks(tmp_path / "empty.jsonl", streaming=True, workers=0)
    (tmp_path / "file").write_text("")
    path = source("jsonl", tmp_path)
    with pytest.raises(StorageError, match="cache_dir"):
        load_tasks(path, streaming=True, cache_dir=tmp_path / "file")


def test_a_worker_that_is_killed_is_reported(tmp_path, monkeypatch):
    cut_small(monkeypatch, 2000)
    parent, hashed = os.getpid(), streaming.fingerprint
    monkeypatch.setattr(
        streaming, "fingerprint", lambda row: hashed(row) if os.getpid() == parent else os.kill(os.getpid(), 9)
    )
    with pytest.raises(DataError, match="could not be made: RuntimeError: One of the subprocesses has abruptly died"):
        load_tasks(source("jsonl", tmp_path), streaming=True, workers=2)
    assert indexes(tmp_path) == []


def test_workers_collect_no_garbage_of_the_process_that_they_were_forked_from(tmp_path, monkeypatch):
    """A destructor of its native objects may wait for threads, which a fork does not have: it would wait for ever."""
    cut_small(monkeypatch, 2000)
    parent, hashed = os.getpid(), streaming.fingerprint

    class Cycle:
        def __del__(self) -> None:
            (tmp_path / f"collected-{'here' if os.getpid() == parent else 'there'}").touch()

    def collecting(row):
        if os.getpid() != parent:
            gc.collect()
            (tmp_path / "collecting").touch()
        return hashed(row)

    monkeypatch.setattr(streaming, "fingerprint", collecting)
    gc.disable()
    try:
        cycle = Cycle()
        cycle.itself = cycle
        del cycle
        assert len(load_tasks(source("jsonl", tmp_path), streaming=True, workers=2)["all"]) > 0
        assert (tmp_path / "collecting").exists() and not list(tmp_path.glob("collected-*"))
        gc.collect()
        assert (tmp_path / "collected-here").exists(), "it is garbage as before"
    finally:
        gc.enable()


# -- the cache -------------------------------------------------------------------------------------


def indexes(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "agentrl" / "tasks").iterdir())


def test_an_index_is_made_once_and_nothing_lies_beside_the_data(tmp_path, monkeypatch):
    path = source("jsonl", tmp_path / "data")
    first = list(load_tasks(path, streaming=True)["all"])
    forget()
    monkeypatch.setattr(streaming, "_entries", lambda **_: pytest.fail("it is made again"))
    assert list(load_tasks(path, streaming=True)["all"]) == first
    assert os.listdir(tmp_path / "data") == ["rows.jsonl"] and len(indexes(tmp_path)) == 1


def test_a_file_that_changed_is_indexed_again_and_the_old_index_goes(tmp_path):
    path = source("jsonl", tmp_path / "data")
    open_before = load_tasks(path, streaming=True)["all"]
    (old,) = indexes(tmp_path)
    write(path, rows(700))
    with pytest.raises(DataError, match="is not what it was when this process opened it"):
        list(open_before)
    assert len(load_tasks(path, streaming=True)["all"]) == 700
    assert indexes(tmp_path) != [old] and len(indexes(tmp_path)) == 1


@pytest.mark.parametrize("what", ["*index*/**/*.arrow", "*.arrow", "dataset_info.json"])
@pytest.mark.parametrize("damage", [lambda file: os.truncate(file, 64), os.unlink])
def test_a_damaged_index_is_made_again(damage, what, tmp_path):
    path = source("parquet", tmp_path)
    first = list(load_tasks(path, streaming=True)["all"])
    damage(next(file for file in indexes(tmp_path)[0].glob(f"**/{what}" if "/" in what or "json" in what else what)))
    forget()
    assert list(load_tasks(path, streaming=True)["all"]) == first
    forget()
    assert len(indexes(tmp_path)) == 1 and list(load_tasks(path, streaming=True)["all"]) == first


def test_a_changed_file_never_gives_a_wrong_row(tmp_path):
    path = source("jsonl", tmp_path)
    tasks = load_tasks(path, streaming=True)["all"]
    data = path.read_bytes()
    path.write_bytes(data.replace(b"5 \xc3\xa9? xxxxx\"", b"5 \xc3\xa9? xxxyx\""))
    assert tasks[4]["n"] == 4
    with pytest.raises(DataError, match="rows.jsonl:.* is not what it was"):
        tasks[5]


def test_an_index_in_use_may_be_removed(tmp_path):
    path = source("parquet", tmp_path)
    tasks = load_tasks(path, streaming=True)["all"]
    shutil.rmtree(tmp_path / "cache")
    assert [row["n"] for row in tasks] == list(range(600))


def test_without_a_place_to_write_the_index_is_temporary(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    code = (
        "import os, sys, tempfile\n"
        "from agentrl.tasks.dataset import load_tasks\n"
        "print(len(load_tasks(sys.argv[1], streaming=True)['all']), len(os.listdir(tempfile.gettempdir())))"
    )
    (tmp_path / "tmp").mkdir()
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")}
    environ["PYTHONPATH"] = str(ROOT)
    path = source("jsonl", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["600", "1"], done.stderr
    assert os.listdir(tmp_path / "tmp") == []


def test_in_a_run_what_is_temporary_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_TMPDIR", str(tmp_path))
    assert len(load_tasks(lambda: [{"prompt": "a", "label": "b"}], streaming=True)["all"]) == 1
    assert len(list(tmp_path.glob("agentrl-tasks-*"))) == 1


def test_several_processes_make_the_same_index_at_once(tmp_path):
    path = source("jsonl", tmp_path)
    code = (
        "import sys\n"
        "from agentrl.tasks.dataset import load_tasks\n"
        "print(len(load_tasks(sys.argv[1], streaming=True)['all']))"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in running] == ["600"] * 3
    assert len(indexes(tmp_path)) == 1


def test_rows_may_be_read_from_threads_pickled_and_copied(tmp_path):
    tasks = load_tasks(source("arrow", tmp_path), streaming=True, test_fraction=0.5)["test"]
    wanted, found = list(tasks), []
    threads = [threading.Thread(target=lambda: found.append(list(tasks))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [wanted] * 8
    assert list(pickle.loads(pickle.dumps(tasks))) == list(copy.deepcopy(tasks)) == wanted
    assert "rows on disk" in repr(tasks)


MEMORY = """
import json, random, sys
from agentrl.tasks.dataset import load_tasks

def private():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

load_tasks(sys.argv[2], streaming=True)  # whatever must be imported is imported
before = private()
tasks = load_tasks(sys.argv[1], streaming=sys.argv[3] == "stream", test_fraction=0.1)["train"]
for place in random.Random(0).sample(range(len(tasks)), 2000):
    assert tasks[place]["answer"]
print(len(tasks), private() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_data(kind, tmp_path):
    """100,000 rows of about 500 bytes; in Parquet they are one row group, as pandas writes them."""
    data = [{"prompt": f"{n} " + chr(97 + n % 26) * 450, "label": str(n), "n": n} for n in range(100_000)]
    path = tmp_path / f"rows.{kind}"
    _ = path.write_text("\n".join(map(json.dumps, data))) if kind == "jsonl" else write_parquet(path, data)
    del data
    small = source(kind, tmp_path / "small")
    used = {}
    for mode in ("load", "stream"):
        arguments = [sys.executable, "-c", MEMORY, str(path), str(small), mode]
        done = subprocess.run(
            arguments, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        count, used[mode] = map(int, done.stdout.split())
        assert 89_000 < count < 91_000
    assert used["stream"] < 0.25 * used["load"], used
