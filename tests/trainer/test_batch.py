"""Micro-batches: every sampled token once, at the place that predicts it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.trainer.batch import BORDERS, micro_batch
from agentrl.trainer.packing import schedule
from agentrl.types import Segment, Trajectory
from tests.trainer.samples import TASK, batch_of, random_batch


def segment(tokens, mask):
    mask = np.array(mask, np.uint8)
    return Segment(np.array(tokens, np.int32), mask, -mask.astype(np.float32), mask.astype(np.int32), 1)


def test_a_micro_batch_points_at_the_predicting_tokens():
    batch = batch_of(
        [
            Trajectory("a", "g", TASK, [segment([1, 2, 3], [0, 1, 1])], []),
            Trajectory("b", "h", TASK, [segment([4, 5], [0, 1])], []),
        ]
    )
    micro = micro_batch(batch.with_columns(advantage=batch.spread(np.array([1.0, 2.0]))), [0, 1], multiple_of=4)
    assert micro.tokens.tolist() == [4, 5, 1, 2, 3, 0, 0, 0]
    assert micro.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert micro.lengths.tolist() == [2, 3, 3]
    assert micro.rows.tolist() == [0, 2, 3]
    assert micro.targets.tolist() == [5, 2, 3]
    assert micro.at.tolist() == [4, 1, 2]
    assert micro.columns["advantage"].tolist() == [2, 1, 1]
    assert all(micro.columns[name].tolist() == [1, 0, 0] for name in BORDERS)


def test_an_empty_micro_batch_still_runs():
    micro = micro_batch(random_batch(2), [], multiple_of=2)
    assert (len(micro.tokens), len(micro.rows)) == (2, 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_micro_batches_hold_every_sampled_token_once(seed, n, dp, multiple):
    batch = random_batch(n, seed=seed)
    (step,) = schedule(batch.lengths.tolist(), dp=dp, max_tokens=100)
    at, targets = [], []
    for rank in step.ranks:
        for samples in rank:
            micro = micro_batch(batch, samples, multiple_of=multiple)
            assert len(micro.tokens) % multiple == 0
            assert (micro.tokens[micro.rows + 1] == micro.targets).all()
            assert (micro.columns["sequence"] == batch.sequence[micro.at]).all()
            at += micro.at.tolist()
            targets += micro.targets.tolist()
    assert sorted(at) == np.flatnonzero(batch.loss_mask).tolist()
    assert batch.tokens[at].tolist() == targets
