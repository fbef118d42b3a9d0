"""Prompts from files: both forms of both formats, splits by content, and bad files named by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

import agentrl
from agentrl.errors import ConfigError, DataError
from agentrl.tasks.dataset import content_hash, load_tasks

SPEC = "agentrl.envs.builtin.prompt:PromptEnv"


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return write(tmp_path / "sums.jsonl", *({"prompt": f"{a} + {a} = ?", "label": str(2 * a)} for a in range(200)))


def test_an_episode_is_one_turn(sums):
    env = agentrl.make(SPEC, path=sums, reward="math")
    observation, info = env.reset(options={"index": 4})
    assert observation == "4 + 4 = ?"
    assert info["messages"] == [{"role": "user", "content": "4 + 4 = ?"}]
    assert info["task_id"] == content_hash(["4 + 4 = ?", "8"])
    assert "raw_prompt" not in info
    _, reward, terminated, truncated, info = env.step("<think>9?</think>It is \\boxed{8}.")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["rewards"] == {"math_answer": 1.0}
    assert env.call_format == "none"


def test_calls_are_text_to_it(sums):
    env = agentrl.make(SPEC, path=sums)
    env.reset(options={"index": 0})
    assert env.step("<tool_call>")[2] is True


def test_chat_prompts_and_metadata(tmp_path):
    prompt = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Why?"}]
    path = write(tmp_path / "chat.jsonl", {"q": prompt, "a": ["x", "y"], "m": {"level": 2}})

    def reward(text, answer, row):
        return row["metadata"]["level"] * (text in answer)

    env = agentrl.make(SPEC, path=path, input_key="q", label_key="a", metadata_key="m", reward=reward)
    observation, info = env.reset(seed=0)
    assert (observation, info["messages"]) == ("Why?", prompt)
    assert env.step("y")[1] == 2.0


def test_a_raw_prompt_goes_without_a_template(sums):
    env = agentrl.make(SPEC, path=sums, apply_chat_template=False)
    assert env.reset(options={"index": 3})[1]["raw_prompt"] == "3 + 3 = ?"


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": [[{"role": "user", "content": "Why?"}], [{"role": "user", "content": "How?"}]]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    rows = load_tasks(tmp_path / "t.parquet")["all"]
    assert [row["prompt"][0]["content"] for row in rows] == ["Why?", "How?"]
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load_tasks(tmp_path / "bad.parquet")


def test_splits_are_by_content_disjoint_and_stable(sums, tmp_path):
    env = agentrl.make(SPEC, path=sums, test_fraction=0.25)
    assert env.num_tasks("train") + env.num_tasks("test") == env.num_tasks("all") == 200
    assert 25 <= env.num_tasks("test") <= 75
    ids = {s: {row["task_id"] for row in env.tasks[s]} for s in ("train", "test")}
    assert not ids["train"] & ids["test"]
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(reversed(Path(sums).read_text().splitlines(keepends=True))))
    again = load_tasks(shuffled, test_fraction=0.25)
    assert {row["task_id"] for row in again["test"]} == ids["test"]
    assert agentrl.make(SPEC, path=sums).num_tasks("test") == 0
    with pytest.raises(ConfigError, match="between 0 and 1"):
        agentrl.make(SPEC, path=sums, test_fraction=2)


def test_equal_rows_have_different_ids_and_one_split(tmp_path):
    tasks = load_tasks(write(tmp_path / "same.jsonl", *[{"prompt": "a", "label": "b"}] * 3), test_fraction=0.5)
    assert len({row["task_id"] for row in tasks["all"]}) == 3
    assert {len(tasks[split]) for split in ("train", "test")} == {0, 3}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', ":2: not JSON: "),
        ("[1]", ":2: expected a JSON object, got list"),
        ('{"question": "a"}', ":2: no key 'prompt'; the row has 'question'. Set --input-key"),
        ('{"prompt": 3}', ":2: 'prompt' must be text or a list of messages, got int"),
        ('{"prompt": []}', ":2: 'prompt' must be text or a list of messages"),
        ('{"prompt": [{"role": "user"}]}', ":2: a message needs 'role' and 'content'"),
        ('{"prompt": "\\xff"}', ":2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "good", "label": "x"}}\n{line}\n')
    with pytest.raises(DataError) as caught:
        agentrl.make(SPEC, path=str(path))
    assert f"{path}{message}" in str(caught.value)


def test_other_bad_files(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=":1: not JSON: 'utf-8' codec"):
        load_tasks(tmp_path / "latin.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_tasks(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="there is no data file"):
        load_tasks(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match=":1: no key 'answer'; the row has .* Set --label-key"):
        path = write(tmp_path / "q.jsonl", {"prompt": "a", "label": "b"})
        agentrl.make(SPEC, path=path, label_key="answer", reward="f1")
    with pytest.raises(DataError, match="need a chat template"):
        path = write(tmp_path / "c.jsonl", {"prompt": [{"role": "user", "content": "a"}], "label": "b"})
        agentrl.make(SPEC, path=path, apply_chat_template=False)
    with pytest.raises(ConfigError, match="unknown reward 'mth'. Did you mean 'math'"):
        agentrl.make(SPEC, path=write(tmp_path / "m.jsonl", {"prompt": "a", "label": "b"}), reward="mth")


def test_a_byte_order_mark_and_blank_lines_are_fine(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}')
    assert [row["prompt"] for row in load_tasks(path)["all"]] == ["a", "b"]


@pytest.mark.filterwarnings("error")
def test_the_checker_finds_nothing(sums):
    check_env(agentrl.make(SPEC, path=sums))


def test_a_row_without_category_has_none(tmp_path):
    """In a table every row has every column; what one has not is null."""
    rows = [{"prompt": "a", "category": "x"}, {"prompt": "b", "category": 2}, {"prompt": "c", "category": None}]
    path = write(tmp_path / "kinds.jsonl", *({**row, "label": "1"} for row in rows))
    env = agentrl.make(SPEC, path=path)
    found = [env.reset(options={"split": "all", "index": i})[1].get("category") for i in range(3)]
    assert found == ["x", "2", None]
