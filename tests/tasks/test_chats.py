"""Rows of written conversations: what is taken, and what is said of a bad one, with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import DataError
from agentrl.tasks.chats import read_chats

HI = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho"}


def call(arguments: Any, name: str = "search") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def written(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not JSON"),
        ({"prompt": "hi"}, "expected a list 'messages'.*the row has prompt"),
        ({"messages": []}, "with at least one message"),
        ({"messages": ["hi", HO]}, "message 1: expected an object"),
        ({"messages": [{"role": "robot", "content": ""}, HO]}, "message 1: role 'robot' is not one of system"),
        ({"messages": [HI]}, "nothing to learn"),
        ({"messages": [HO, HI]}, "the first message is the assistant's"),
        ({"messages": [HI, {"role": "assistant", "content": ""}]}, "message 2: the assistant says nothing"),
        ({"messages": [HI, {"role": "assistant", "content": 3}]}, "message 2: 'content' must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, HO]}, "parts of type text"),
        ({"messages": [HI, call("{")]}, "message 2: call 1: the arguments of 'search' are not JSON"),
        ({"messages": [HI, call("[1]")]}, "must be an object"),
        ({"messages": [HI, call({}, name="")]}, r"call 1: expected \{'function'"),
        ({"messages": [{**call({}), "role": "user"}, HO]}, "the assistant's alone"),
        ({"messages": [HI, {**HO, "weight": 0.5}]}, "message 2: 'weight' must be 1 .true. or 0 .false., got 0.5"),
        ({"messages": [{**HI, "train": True}, HO]}, "message 1: 'train' marks words of user as learned"),
        ({"messages": [HI, {**HO, "train": False}]}, "but those that are not to be learned, so there"),
        ({"messages": [HI, {**HO, "more": "{}"}]}, "message 2: it is of a stored trajectory; give --sft-from the run"),
        ({"messages": [HI, HO], "tools": "{"}, "'tools' is text that is not JSON"),
        ({"messages": [HI, HO], "tools": [{"name": "search"}]}, "tool 1: expected"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, words):
    path = written(tmp_path / "chats.jsonl", {"messages": [HI, HO]}, "", row)
    with pytest.raises(DataError, match=words) as caught:
        read_chats(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_forms_of_the_same_conversation_are_the_same(tmp_path):
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    parts = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": None}
    path = written(
        tmp_path / "chats.jsonl",
        {"messages": [HI, call({"query": "x"}), {"role": "tool", "content": "y"}, HO], "tools": tools},
        {"messages": [parts, call('{"query": "x"}'), {"role": "tool", "content": "y"}, HO], "tools": json.dumps(tools)},
        {"messages": [HI, HO]},
    )
    first, second, third = read_chats(path)
    assert first.messages == second.messages and first.tools == second.tools == tools
    assert first.chat_id == second.chat_id != third.chat_id
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"query": "x"} and third.tools is None


def test_a_turn_is_left_out_of_what_is_learned_in_each_usual_way(tmp_path):
    marks = [{"weight": 0}, {"train": False}, {"step_loss_mask": 0}, {"weight": 1, "train": None}, {}]
    rows = [{"messages": [{**HI, "weight": 0}, {**HO, **mark}, HI, {**HO, "weight": 1}]} for mark in marks]
    *out, learned, plain = read_chats(written(tmp_path / "chats.jsonl", *rows))
    assert [chat.messages for chat in out] == [[HI, {**HO, "weight": 0}, HI, HO]] * 3
    assert learned.messages == plain.messages == [HI, HO, HI, HO] and learned.chat_id != out[0].chat_id


def test_parquet_with_empty_fields_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {"messages": [HI, {**HO, "reasoning_content": "hm"}], "tools": None}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "chats.parquet")
    (chat,) = read_chats(tmp_path / "chats.parquet")
    assert chat.messages == row["messages"]


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no conversation"):
        read_chats(written(tmp_path / "chats.jsonl", ""))
