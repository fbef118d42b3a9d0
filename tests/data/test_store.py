import json
import os
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.records import from_record, to_record
from agentrl.data.store import ROW_GROUP, TrajectoryStore, arrow_schema
from agentrl.errors import DataError, StorageError
from agentrl.types import Segment, StopReason, Task, Trajectory


@pytest.fixture
def store(tmp_path):
    return TrajectoryStore(tmp_path / "trajectories")


def test_what_is_written_is_read(store, make_trajectory, same):
    written = [
        make_trajectory(0),
        make_trajectory(1, segments=3, length=7),
        make_trajectory(2, success=None, error="the tool is down", stop_reason=StopReason.TOOL_ERROR),
        make_trajectory(3, length=1),
    ]
    store.write(5, written)
    read = list(store.read())
    assert len(read) == 4
    for a, b in zip(written, read, strict=True):
        same(a, b)


def test_no_segments_and_no_trajectories(store, make_trajectory, same):
    empty = make_trajectory(0)
    empty.segments = []
    store.write(1, [empty])
    same(empty, next(store.read()))
    store.write(2, [])
    assert store.table(step=2).num_rows == 0 and store.table("nothing").num_rows == 0
    assert store.table("nothing", columns=["reward"]).column_names == ["reward"]


def test_more_than_one_row_group(store, make_trajectory, same):
    written = [make_trajectory(i, length=5 + i % 3, segments=i % 3) for i in range(2 * ROW_GROUP + 3)]
    store.write(1, iter(written))
    assert pq.ParquetFile(store.part_path("train", 1)).num_row_groups == 3
    for a, b in zip(written, store.read(), strict=True):
        same(a, b)


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6), st.text(), st.floats())
def test_any_shape_and_any_text_survive(tmp_path_factory, shapes, text, number):
    def segment(n):
        return Segment(
            np.arange(n, dtype=np.int32), np.ones(n, np.uint8), np.zeros(n, np.float32), np.ones(n, np.int32), 0
        )

    ts = [
        Trajectory(
            f"t{i}",
            text,
            Task(text, i),
            [segment(n) for n in shape],
            [{"role": "user", "content": text}],
            info={"x": number},
            error=text,
        )
        for i, shape in enumerate(shapes)
    ]
    store = TrajectoryStore(tmp_path_factory.mktemp("any"))
    store.write(0, ts)
    read = list(store.read())
    assert [[len(s) for s in t.segments] for t in read] == shapes
    for t in read:
        assert t.messages[0]["content"] == text
        assert t.info["x"] == (number if np.isfinite(number) else None)


def test_lone_surrogates_and_null_bytes(store, make_trajectory):
    hostile = "a\ud800b\x00</s>"
    store.write(0, [make_trajectory(0, error=hostile, messages=[{"role": "assistant", "content": hostile}])])
    (read,) = store.read()
    assert read.messages[0]["content"] == read.error == "a\\ud800b\x00</s>"


def test_records_round_trip_through_json(make_trajectory, same):
    written = make_trajectory(1, segments=2)
    line = json.dumps(to_record(written), allow_nan=False)
    same(written, from_record(json.loads(line)))


def test_a_part_and_a_line_hold_the_same_fields(store, make_trajectory):
    calls = [{"function": {"name": "search", "arguments": {"q": 1}}}]
    written = make_trajectory(1, messages=[{"role": "assistant", "content": None, "tool_calls": calls}])
    store.write(0, [written])
    (row,) = store.table().to_pylist()
    line = to_record(written)
    assert set(row) - {"step", "name", "advantage", "trained"} == set(line) - {"schema_version", "set"}
    assert all(row[name] == line[name] for name in line if name in row and name != "segments")
    assert from_record(line).messages == from_record(row).messages == written.messages


def test_a_part_of_before_messages_were_rows_is_read(store, make_trajectory, same):
    written = make_trajectory(1)
    path = store.write(0, [written])
    table = pq.read_table(path)
    text = pyarrow.array([json.dumps(written.messages)])
    place = table.schema.get_field_index("messages")
    pq.write_table(
        table.set_column(place, "messages", text).replace_schema_metadata({b"agentrl.schema_version": b"1"}), path
    )
    same(written, next(store.read()))


def test_what_tokens_were_trained_with_is_stored_and_read_back(store, make_trajectory):
    kept, plain = make_trajectory(0, segments=2), make_trajectory(1)
    length = len(kept.segments[1])
    advantage, ref = np.full(length, 0.5, np.float32), np.arange(length, dtype=np.float32)
    kept.segments[1].trained = {"advantage": advantage, "ref": ref}
    store.write(0, [plain, kept])
    store.write(1, [plain])
    first, second = store.read("train", step=0)
    assert [s.trained for s in first.segments] == [{}] and second.segments[0].trained == {}
    assert {n: v.tolist() for n, v in second.segments[1].trained.items()} == {
        "advantage": [0.5] * length,
        "ref": list(range(length)),
    }
    assert store.table("train").column("trained").null_count == 2  # where nothing was kept


def test_a_part_of_before_tokens_kept_what_they_were_trained_with(store, make_trajectory, same):
    path = store.write(0, [make_trajectory(0)])
    pq.write_table(pq.read_table(path).drop_columns(["trained"]), path)
    store.write(1, [make_trajectory(1)])
    same(next(store.read()), make_trajectory(0))
    assert store.table().num_rows == 2


def test_advantages_and_columns_for_pandas(store, make_trajectory):
    trajectories = [make_trajectory(i) for i in range(4)]
    trajectories[0].advantage, trajectories[1].advantage = -0.5, 0.5
    store.write(3, trajectories)
    store.write(3, [make_trajectory(9)], name="eval-search")
    frame = pandas.read_parquet(store.folder)
    assert list(frame.columns) == arrow_schema().names and len(frame) == 5
    assert frame.set_index("trajectory_id").advantage[["t0", "t1"]].tolist() == [-0.5, 0.5]
    assert store.table("train", columns=["reward", "step"]).to_pydict() == {
        "reward": [0.0, 1.0, 0.0, 1.0],
        "step": [3] * 4,
    }
    tokens = frame.segments[0][0]["tokens"]
    assert len(tokens) == len(frame.segments[0][0]["logprobs"]) == frame.num_tokens[0]


def test_parts_are_listed_and_rewound(store, make_trajectory):
    for step in (0, 1, 2, 3):
        store.write(step, [make_trajectory(step)])
    for step in (0, 2, 3):
        store.write(step, [make_trajectory(step)], name="eval-search")
    assert [(p.name, p.step) for p in store.parts("eval-search")] == [("eval-search", s) for s in (0, 2, 3)]
    assert store.rewind(2) == 3
    assert [(p.name, p.step) for p in store.parts()] == [
        ("eval-search", 0),
        ("eval-search", 2),
        ("train", 0),
        ("train", 1),
    ]


def test_doing_a_step_again_replaces_its_part(store, make_trajectory):
    store.write(1, [make_trajectory(1)])
    store.write(1, [make_trajectory(2)])
    assert [t.trajectory_id for t in store.read()] == ["t2"]


def test_names_stay_inside_the_folder(store):
    with pytest.raises(DataError, match="'../x'"):
        store.write(0, [], name="../x")


def test_a_torn_file_is_named(store, make_trajectory):
    path = store.write(1, [make_trajectory(1)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="train-000001.parquet.*torn"):
        list(store.read())


def test_a_newer_schema_is_refused(store, make_trajectory):
    path = store.write(1, [make_trajectory(1)])
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"agentrl.schema_version": b"99"}), path)
    with pytest.raises(DataError, match="version 99"):
        store.table()


def test_a_failing_write_leaves_nothing(store, make_trajectory):
    def trajectories():
        yield make_trajectory(0)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        store.write(1, trajectories())
    assert os.listdir(store.folder) == []


def test_disk_full_is_clear_and_leaves_nothing(store, make_trajectory, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    store.write(1, [make_trajectory(1)])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="train-000001.parquet.*disk is full.*--load"):
        store.write(1, [make_trajectory(2)])
    assert os.listdir(store.folder) == ["train-000001.parquet"]
    assert [t.trajectory_id for t in store.read()] == ["t1"]


def test_a_kill_while_writing_leaves_the_old_part(tmp_path, make_trajectory):
    """The writer is killed with half a file on disk; the next opening clears it away."""
    code = f"""
import os, signal
from agentrl.data.store import TrajectoryStore
def trajectories():
    os.kill(os.getpid(), signal.SIGKILL)
    yield
TrajectoryStore({str(tmp_path)!r}).write(1, trajectories())
"""
    TrajectoryStore(tmp_path).write(1, [make_trajectory(7)])
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert [t.trajectory_id for t in TrajectoryStore(tmp_path).read()] == ["t7"]
    assert os.listdir(tmp_path) == ["train-000001.parquet"]


def test_memory_of_a_write_is_bounded_by_the_arrays(store, make_trajectory):
    import pyarrow as pa

    store.write(0, [make_trajectory(0)])
    written = [make_trajectory(i, length=2000) for i in range(1000)]
    arrays = sum(
        getattr(s, n).nbytes
        for t in written
        for s in t.segments
        for n in ("tokens", "loss_mask", "logprobs", "versions")
    )
    others = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(others)  # its peak is of this test alone
    pa.set_memory_pool(pool)
    tracemalloc.start()
    store.write(1, written)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pa.set_memory_pool(others)
    assert pool.max_memory() > 0
    assert python_peak + pool.max_memory() < arrays  # beside the arrays themselves: 2 x in all
