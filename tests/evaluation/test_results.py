"""Reading an evaluation back, and what the files are for other programs."""

import json

import pandas
import pyarrow.json
import pytest

from agentrl.data.files import JsonLines, write_text
from agentrl.data.records import to_record
from agentrl.data.store import TrajectoryStore
from agentrl.errors import DataError
from agentrl.evaluation.results import load
from agentrl.types import StopReason, Task, Trajectory


def episode(number=0, **fields):
    values = {
        "messages": [
            {"role": "user", "content": "Who?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": {"n": number}}}],
            },
            {"role": "tool", "content": "She.", "tool_call_id": "1"},
        ],
        "rewards": {"exact": 1},
        "info": {"category": "easy", "answer": ["She", 2]},
        "timings": {"total": 1.5},
        "tool_calls": [{"name": "find", "arguments": {"n": number}}],
    }
    task = Task(f"x/test/{number}", number, "test", {"index": number}, "x")
    return Trajectory(f"x/test/{number}:000", f"x/test/{number}", task, [], **(values | fields))


# Of every field that is of free form, episodes in which it has other types.
MIXED = [
    episode(0),
    episode(1, info={"category": 3, "answer": "She"}, rewards={}, tool_calls=[{"name": "find", "arguments": "x"}]),
    episode(2, stop_reason=StopReason.TOOL_ERROR, error="down", rewards={"format": 0.5}, turn_rewards=[1.0]),
    episode(3, messages=[{"role": "user", "content": "\ud800 and \x00"}, {"role": "assistant", "content": None}]),
]  # fmt: skip


@pytest.fixture
def written(tmp_path):
    lines = JsonLines(tmp_path / "trajectories.jsonl")
    for trajectory in MIXED:
        lines.append(to_record(trajectory, set_name="held"))
    lines.close()
    return tmp_path


def test_what_was_written_is_read(written):
    result = load(written)
    assert result.summaries == result.record == result.config == {} and result.step is None
    assert list(result.sets) == ["held"]
    for before, after in zip(MIXED[:3], result.sets["held"], strict=False):
        assert before == after
    assert result.sets["held"][3].messages[1] == {"role": "assistant", "content": None}


def test_a_torn_last_line_is_passed_over(written):
    with (written / "trajectories.jsonl").open("a") as stream:
        stream.write('{"schema_version": 1, "set": "he')
    assert len(load(written).sets["held"]) == len(MIXED)


@pytest.mark.parametrize(
    ("line", "part"),
    [("{}", "schema version None"),
     ('{"schema_version": 99}', "reads up to"), ('{"schema_version": 1}', "not the record"),
     ("nonsense", "not a line of JSON")],
)  # fmt: skip
def test_a_damaged_line_is_named(written, line, part):
    with (written / "trajectories.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(DataError, match=rf"trajectories.jsonl:5: .*{part}"):
        load(written)


def test_other_programs_read_the_lines(written):
    file = written / "trajectories.jsonl"
    frame = pandas.read_json(file, lines=True)
    assert frame.set.tolist() == ["held"] * 4 and frame.reward.tolist() == [0.0] * 4
    assert [m["role"] for m in frame.messages[0]] == ["user", "assistant", "tool"]
    assert json.loads(frame["info"][0])["category"] == "easy"
    options = pyarrow.json.ReadOptions(block_size=2048)  # small blocks: types must agree over them
    table = pyarrow.json.read_json(file, read_options=options)
    assert table.num_rows == 4 and json.loads(table.column("rewards").to_pylist()[2])["format"] == 0.5


def test_summaries_carry_a_version(written):
    write_text(written / "summary.json", json.dumps({"schema_version": 1, "sets": {"held": {"episodes": 4}}}))
    assert load(written / "summary.json").summaries == {"held": {"episodes": 4}}
    for text, part in (
        ('{"schema_version": 2, "sets": {}}', "schema version 1"),
        ("{", "cannot be read"),
        ("[]", "list"),
    ):
        write_text(written / "summary.json", text)
        with pytest.raises(DataError, match=part):
            load(written)


def test_a_training_run_by_step(tmp_path):
    store = TrajectoryStore(tmp_path / "trajectories")
    with pytest.raises(DataError, match="--eval-interval"):
        load(tmp_path)
    store.write(0, [episode(0)], name="eval-held")
    store.write(2, [episode(1), episode(2)], name="eval-held")
    store.write(1, [episode(3)], name="train")
    lines = JsonLines(tmp_path / "evaluations.jsonl")
    for step in (0, 2):
        lines.append({"step": step, "sets": {"held": {"turns": step}}})
    lines.close()
    partial = tmp_path / "trajectories" / ".part.1.partial"
    partial.touch()
    newest = load(tmp_path, segments=False)
    assert (newest.step, newest.sets["held"], newest.summaries) == (2, [episode(1), episode(2)], {"held": {"turns": 2}})
    assert partial.exists(), "reading a run that goes on must not touch it"
    first = load(tmp_path, step=0)
    assert (first.step, len(first.sets["held"]), first.summaries["held"]["turns"]) == (0, 1, 0)
    assert set(load(tmp_path, train=True).sets) == {"held", "train"}
    with pytest.raises(DataError, match="no evaluation after step 1; there are some after 0, 2"):
        load(tmp_path, step=1)


def test_what_is_no_run(tmp_path):
    for path, part in ((tmp_path / "no", "no such run folder"), (tmp_path, "neither trajectories.jsonl")):
        with pytest.raises(DataError, match=part):
            load(path)
