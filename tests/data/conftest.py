"""Trajectories and groups with tokens, as an episode loop would make them."""

import numpy as np
import pytest

from agentrl.types import Group, Segment, StopReason, Task, Trajectory


def make_segment(rng, length, sampled=None):
    mask = (rng.random(length) < 0.5).astype(np.uint8) if sampled is None else sampled
    return Segment(
        tokens=rng.integers(0, 32000, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        prompt_length=int(length // 3),
    )


@pytest.fixture
def make_trajectory():
    """``make_trajectory(i, length=50, segments=1, **fields)``."""

    def make(i=0, *, length=50, segments=1, **fields):
        rng = np.random.default_rng(i)
        task = Task(f"search/train/{i}", i, "train", {"split": "train", "index": i}, "search")
        values = {
            "reward": float(i % 2),
            "rewards": {"exact": float(i % 2)},
            "turn_rewards": [0.0, float(i % 2)],
            "success": bool(i % 2),
            "num_turns": 2,
            "tool_calls": [{"name": "search", "arguments": {"query": "Ada"}}],
            "info": {"answer": "Ada"},
            "timings": {"engine": 0.5},
            "messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "Ada"}],
            "segments": [make_segment(rng, length) for _ in range(segments)],
        }
        return Trajectory(f"t{i}", f"g{i // 4}", task, **(values | fields))

    return make


@pytest.fixture
def make_group():
    """``make_group(draw)``: an empty finished group for a draw."""
    return lambda draw: Group(draw.group_id, draw.task, [])


@pytest.fixture
def same():
    """Asserts that two trajectories are equal in every field and every array, dtypes included."""

    def check(a, b):
        assert len(a.segments) == len(b.segments)
        for x, y in zip(a.segments, b.segments, strict=True):
            assert x.prompt_length == y.prompt_length
            for name in ("tokens", "loss_mask", "logprobs", "versions"):
                left, right = getattr(x, name), getattr(y, name)
                assert left.dtype == right.dtype and np.array_equal(left, right), name
        for name in Trajectory.__dataclass_fields__:
            if name != "segments":
                assert getattr(a, name) == getattr(b, name), name
        assert isinstance(b.stop_reason, StopReason)

    return check
