"""A trajectory as a plain record and back: the one description of what is stored, by training (Parquet) and by
evaluation (JSONL).

A field has one type in every record, whatever the environment, so that table readers (pandas, pyarrow, Hugging Face
datasets) take both: what is of free form is JSON text, and a message is its text fields and, as JSON text under
``more``, the rest of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from agentrl.data.files import finite, to_json
from agentrl.types import Message, Segment, StopReason, Task, Trajectory

SCHEMA_VERSION = 2
"""Raised when a field changes its meaning; readers refuse a newer one."""

JSON_FIELDS = ("rewards", "messages", "tool_calls", "info", "timings", "task_options")
"""Fields of free form, stored as JSON text; messages as rows of :data:`MESSAGE_FIELDS`."""

MESSAGE_FIELDS = ("role", "content", "reasoning_content", "name", "tool_call_id", "more")

SEGMENT_ARRAYS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
"""Arrays of a segment, one entry a token each."""

TRAINED_ARRAYS = ("advantage", "correction", "old", "current", "ref", "ratio", "values", "returns")
"""Arrays of what a segment was trained with, float32, where they were kept."""


def clean(text: str | None) -> str | None:
    """``text`` as valid Unicode: lone surrogates, which a model can produce, become ``\\udXXX`` escapes."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


COLUMNS: dict[str, tuple[str, Callable[[Trajectory], Any]]] = {
    "trajectory_id": ("string", lambda t: clean(t.trajectory_id)),
    "group_id": ("string", lambda t: clean(t.group_id)),
    "task_id": ("string", lambda t: clean(t.task.task_id)),
    "env": ("string", lambda t: clean(t.task.env)),
    "task_split": ("string", lambda t: clean(t.task.split)),
    "task_seed": ("int64", lambda t: int(t.task.seed)),
    "task_options": ("string", lambda t: to_json(t.task.options)),
    "agent": ("string", lambda t: clean(t.agent)),
    "reward": ("double", lambda t: float(t.reward)),
    "rewards": ("string", lambda t: to_json(t.rewards)),
    "turn_rewards": ("doubles", lambda t: [float(r) for r in t.turn_rewards]),
    "success": ("bool", lambda t: None if t.success is None else bool(t.success)),
    "stop_reason": ("string", lambda t: str(t.stop_reason)),
    "outcome": ("string", lambda t: str(t.outcome)),
    "error": ("string", lambda t: clean(t.error)),
    "num_turns": ("int32", lambda t: int(t.num_turns)),
    "num_tokens": ("int64", lambda t: t.num_tokens),
    "num_sampled": ("int64", lambda t: t.num_sampled),
    "messages": ("messages", lambda t: [_message_row(m) for m in t.messages]),
    "tool_calls": ("string", lambda t: to_json(t.tool_calls)),
    "info": ("string", lambda t: to_json(t.info)),
    "timings": ("string", lambda t: to_json(t.timings)),
}
"""What is stored of a trajectory besides its tokens: name -> Arrow type (or ``doubles``, ``messages``) and value."""


def scalars(trajectory: Trajectory) -> dict[str, Any]:
    """Everything of a trajectory but its tokens, as it is stored."""
    return {name: value(trajectory) for name, (_, value) in COLUMNS.items()}


def to_record(trajectory: Trajectory, *, set_name: str = "") -> dict[str, Any]:
    """A JSON-ready record with tokens, for a line of JSONL; ``set_name``: the held-out set it belongs to."""
    segments = [
        {**{name: getattr(s, name).tolist() for name in SEGMENT_ARRAYS}, "prompt_length": int(s.prompt_length)}
        for s in trajectory.segments
    ]
    record = {"schema_version": SCHEMA_VERSION, "set": clean(set_name), **scalars(trajectory)}
    return {**finite(record), "segments": segments}


def _message_row(message: Mapping[str, Any]) -> dict[str, str | None]:
    text = {name: clean(value) for name in MESSAGE_FIELDS[:-1] if isinstance(value := message.get(name), str)}
    rest = {name: value for name, value in message.items() if name not in text}
    return {**dict.fromkeys(MESSAGE_FIELDS), **text, "more": to_json(rest) if rest else None}


def _message(row: Mapping[str, Any]) -> Message:
    text = {name: value for name, value in row.items() if name != "more" and value is not None}
    return cast(Message, {**text, **json.loads(row.get("more") or "{}")})


def from_record(record: Mapping[str, Any], *, segments: bool = True) -> Trajectory:
    """Inverse of :func:`to_record`, without tokens if so asked; array fields may be lists or numpy arrays, JSON fields
    text or objects."""
    free = {name: json.loads(record[name]) if isinstance(record[name], str) else record[name] for name in JSON_FIELDS}
    free["messages"] = [_message(row) for row in free["messages"]]
    task = Task(record["task_id"], record["task_seed"], record["task_split"], free["task_options"], record["env"])
    tokens = [
        Segment(
            **{name: np.asarray(s[name], dtype=dtype) for name, dtype in SEGMENT_ARRAYS.items()},
            prompt_length=int(s["prompt_length"]),
            trained={n: np.asarray(v, np.float32) for n, v in (s.get("trained") or {}).items() if v is not None},
        )
        for s in (record["segments"] if segments else ())
    ]
    values = {
        field.name: record[field.name]
        for field in dataclasses.fields(Trajectory)
        if field.name in record and field.name not in free
    }
    values |= {name: free[name] for name in ("rewards", "messages", "tool_calls", "info", "timings")}
    values |= {
        "task": task,
        "segments": tokens,
        "stop_reason": StopReason(record["stop_reason"]),
        "turn_rewards": list(record["turn_rewards"]),
    }
    return Trajectory(**values)
