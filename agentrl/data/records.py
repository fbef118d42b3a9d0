"""A trajectory as a plain record and back: the one description of what is stored."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from agentrl.data.files import finite
from agentrl.types import Segment, StopReason, Task, Trajectory

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning; readers refuse a newer one."""

JSON_FIELDS = ("rewards", "messages", "tool_calls", "info", "timings", "task_options")
"""Fields of free form, stored as JSON text in columns."""

SEGMENT_ARRAYS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
"""Arrays of a segment, one entry a token each."""


def clean(text: str | None) -> str | None:
    """``text`` as valid Unicode: lone surrogates, which a model can produce, become ``\\udXXX`` escapes."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: Any) -> str:
    """JSON text in ASCII; NaN and infinities become null, other objects their ``repr``."""
    return json.dumps(finite(value), allow_nan=False, default=_as_plain)


def _as_plain(value: Any) -> Any:
    return finite(value.tolist()) if hasattr(value, "tolist") else repr(value)


def scalars(trajectory: Trajectory) -> dict[str, Any]:
    """Everything of a trajectory but its tokens; free-form fields as objects."""
    t = trajectory
    return {
        "trajectory_id": clean(t.trajectory_id),
        "group_id": clean(t.group_id),
        "task_id": clean(t.task.task_id),
        "env": clean(t.task.env),
        "task_split": clean(t.task.split),
        "task_seed": int(t.task.seed),
        "task_options": t.task.options,
        "agent": clean(t.agent),
        "reward": float(t.reward),
        "rewards": t.rewards,
        "turn_rewards": [float(r) for r in t.turn_rewards],
        "success": None if t.success is None else bool(t.success),
        "stop_reason": str(t.stop_reason),
        "outcome": str(t.outcome),
        "error": clean(t.error),
        "num_turns": int(t.num_turns),
        "num_tokens": t.num_tokens,
        "num_sampled": t.num_sampled,
        "messages": t.messages,
        "tool_calls": t.tool_calls,
        "info": t.info,
        "timings": t.timings,
    }


def to_record(trajectory: Trajectory) -> dict[str, Any]:
    """A JSON-ready record with tokens, for a line of JSONL."""
    segments = [
        {**{name: getattr(s, name).tolist() for name in SEGMENT_ARRAYS}, "prompt_length": int(s.prompt_length)}
        for s in trajectory.segments
    ]
    record = json.loads(to_json(scalars(trajectory)))
    return {"schema_version": SCHEMA_VERSION, **record, "segments": segments}


def from_record(record: dict[str, Any]) -> Trajectory:
    """Inverse of :func:`to_record`; array fields may be lists or numpy arrays, JSON fields text or objects."""
    free = {name: json.loads(record[name]) if isinstance(record[name], str) else record[name] for name in JSON_FIELDS}
    task = Task(record["task_id"], record["task_seed"], record["task_split"], free["task_options"], record["env"])
    segments = [
        Segment(
            **{name: np.asarray(s[name], dtype=dtype) for name, dtype in SEGMENT_ARRAYS.items()},
            prompt_length=int(s["prompt_length"]),
        )
        for s in record["segments"]
    ]
    values = {
        field.name: record[field.name]
        for field in dataclasses.fields(Trajectory)
        if field.name in record and field.name not in free
    }
    values |= {name: free[name] for name in ("rewards", "messages", "tool_calls", "info", "timings")}
    values |= {
        "task": task,
        "segments": segments,
        "stop_reason": StopReason(record["stop_reason"]),
        "turn_rewards": list(record["turn_rewards"]),
    }
    return Trajectory(**values)
