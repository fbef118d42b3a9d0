"""Batches: every sampled token once, at the place that predicts it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import LedgerError
from agentrl.trainer.batch import TrainBatch, TrainSample
from agentrl.trainer.packing import schedule
from agentrl.types import Group, Segment, Task, Trajectory
from tests.trainer.samples import random_batch


def segment(tokens, mask):
    mask = np.array(mask, np.uint8)
    n = len(tokens)
    return Segment(
        np.array(tokens, np.int32), mask, -mask.astype(np.float32), np.where(mask, 3, -1).astype(np.int32), n // 2
    )


def test_all_segments_share_the_advantage_and_unsampled_ones_are_left_out():
    task = Task("t", 0)
    parts = [segment([1, 2, 3], [0, 1, 1]), segment([4, 5], [0, 0]), segment([6, 7, 8, 9], [0, 0, 1, 0])]
    groups = [Group("g", task, [Trajectory("a", "g", task, parts, []), Trajectory("b", "g", task, parts[:1], [])])]
    batch = TrainBatch.from_groups(groups, {"a": 2.0})
    assert batch.tokens.tolist() == [1, 2, 3, 6, 7, 8, 9]
    assert batch.advantages.tolist() == [0, 2, 2, 0, 0, 2, 0]
    assert batch.segments == (0, 2)
    assert batch.trajectory_ids == ("a", "a")
    assert (batch.num_sampled, batch.num_trajectories, len(batch)) == (3, 1, 2)


def test_a_micro_batch_points_at_the_predicting_tokens():
    samples = [
        TrainSample.from_segment(segment([1, 2, 3], [0, 1, 1]), 1.0, trajectory_id="a", group_id="g"),
        TrainSample.from_segment(segment([4, 5], [0, 1]), 2.0, trajectory_id="b", group_id="g"),
    ]
    micro = TrainBatch.from_samples(samples).micro_batch([0, 1], multiple_of=4)
    assert micro.tokens.tolist() == [4, 5, 1, 2, 3, 0, 0, 0]
    assert micro.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert micro.lengths.tolist() == [2, 3, 3]
    assert micro.rows.tolist() == [0, 2, 3]
    assert micro.targets.tolist() == [5, 2, 3]
    assert micro.columns.tolist() == [4, 1, 2]
    assert micro.advantages.tolist() == [2, 1, 1]


def test_an_empty_micro_batch_still_runs():
    micro = random_batch(2).micro_batch([], multiple_of=2)
    assert (micro.num_tokens, micro.num_sampled) == (2, 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_micro_batches_hold_every_sampled_token_once(seed, n, dp, multiple):
    batch = random_batch(n, seed=seed)
    (step,) = schedule(batch.lengths.tolist(), dp=dp, max_tokens=100)
    columns, targets = [], []
    for rank in step.ranks:
        for samples in rank:
            micro = batch.micro_batch(samples, multiple_of=multiple)
            assert micro.num_tokens % multiple == 0
            assert (micro.tokens[micro.rows + 1] == micro.targets).all()
            columns += micro.columns.tolist()
            targets += micro.targets.tolist()
    assert sorted(columns) == np.flatnonzero(batch.loss_mask).tolist()
    assert batch.tokens[columns].tolist() == targets


def test_a_sampled_first_token_is_refused():
    sample = TrainSample.from_segment(segment([1, 2], [1, 1]), 1.0, trajectory_id="a", group_id="g")
    with pytest.raises(LedgerError, match="first token"):
        TrainBatch.from_samples([sample])


def test_the_same_segment_twice_is_refused():
    sample = TrainSample.from_segment(segment([1, 2], [0, 1]), 1.0, trajectory_id="a", group_id="g")
    with pytest.raises(LedgerError, match="comes twice"):
        TrainBatch.from_samples([sample, sample])


def test_a_log_probability_that_is_no_number_is_refused():
    s = segment([1, 2], [0, 1])
    s.logprobs[1] = np.nan
    with pytest.raises(LedgerError, match="not finite"):
        TrainBatch.from_samples([TrainSample.from_segment(s, 1.0, trajectory_id="a", group_id="g")])


def test_arrays_of_unequal_length_are_refused():
    sample = TrainSample.from_segment(segment([1, 2], [0, 1]), 1.0, trajectory_id="a", group_id="g")
    with pytest.raises(LedgerError, match="lengths differ"):
        TrainBatch.from_samples([TrainSample(**{**vars(sample), "tokens": sample.tokens[:1]})])
