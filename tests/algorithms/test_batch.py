"""Batches: every sampled token once, with its sequence, trajectory, turn and group."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.algorithms import TrainBatch
from agentrl.algorithms.aggregation import AGGREGATIONS, aggregate
from agentrl.errors import ConfigError, DataError, LedgerError
from agentrl.types import Group, Segment, Task, Trajectory

TASK = Task("t", 0)


def segment(tokens, mask):
    mask = np.array(mask, np.uint8)
    n = len(tokens)
    return Segment(
        np.array(tokens, np.int32), mask, -mask.astype(np.float32), np.where(mask, 3, -1).astype(np.int32), n // 2
    )


def batch_of(**segments):
    """Trajectories by name, each of a group of its first letter."""
    trajectories = [Trajectory(name, name[0], TASK, parts, []) for name, parts in segments.items()]
    return TrainBatch.from_groups([Group("g", TASK, trajectories)], set(segments))


@pytest.fixture
def batch():
    two = [segment([1, 2, 3, 4, 5], [0, 1, 0, 1, 1]), segment([4, 5], [0, 0]), segment([6, 7, 8], [0, 1, 0])]
    return batch_of(a1=two, b1=[segment([1, 2], [0, 1])], a2=[segment([5, 6, 7], [0, 1, 1])])


def test_tokens_know_their_borders_and_unsampled_segments_are_left_out(batch):
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 5, 6, 7]
    assert batch.segments.tolist() == [0, 2, 0, 0]
    assert batch.sequence.tolist() == [0] * 5 + [1] * 3 + [2] * 2 + [3] * 3
    assert batch.trajectory.tolist() == [0] * 8 + [1] * 2 + [2] * 3
    assert batch.group.tolist() == [0] * 8 + [1] * 2 + [0] * 3
    assert batch.turn[batch.loss_mask == 1].tolist() == [0, 1, 1, 2, 3, 4, 4]
    assert (batch.num_sampled, batch.num_trajectories, len(batch), batch.steps(9)) == (7, 3, 4, 3)
    assert batch.sampled_of.tolist() == [3, 1, 1, 2]


def test_sums_means_and_what_is_spread_are_over_all_segments(batch):
    values = np.arange(batch.num_tokens, dtype=np.float64)
    assert batch.sums(values).tolist() == [1 + 3 + 4 + 6, 9, 11 + 12]
    assert batch.means(values).tolist() == [14 / 4, 9, 23 / 2]
    assert batch.spread(np.array([1.0, 2.0, 3.0])).tolist() == [0, 1, 0, 1, 1, 0, 1, 0, 0, 2, 0, 3, 3]


def test_what_was_trained_comes_back_to_the_segments(batch):
    trajectories = [Trajectory(n, "g", TASK, [segment([1, 2], [0, 1]) for _ in range(3)], []) for n in ("a1", "b1")]
    trajectories.append(Trajectory("a2", "g", TASK, [segment([1], [0])], []))
    columns = {"advantage": batch.spread(np.array([0.1, 0.2, 0.3])), "old": np.arange(13, dtype=np.float32)}
    batch.note_trained(trajectories, columns, tokens=True)
    assert [t.advantage for t in trajectories] == pytest.approx([0.1, 0.2, 0.3])
    assert trajectories[0].segments[2].trained["old"].tolist() == [5, 6, 7]
    assert trajectories[0].segments[1].trained == {}
    batch.note_trained(trajectories, columns, tokens=False)
    assert trajectories[0].segments[2].trained == {}


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_weights_of_a_step_sum_to_one(batch, how):
    for samples in ([0, 1, 2, 3], [0, 1], [2]):
        weights = aggregate(batch, samples, how, longest=1)
        tokens = {4: 7 / 3, 2: 4, 1: 1}[len(samples)]
        assert weights.sum() == pytest.approx(tokens if how == "seq-mean-token-sum-norm" else 1)
        assert (weights > 0).sum() == batch.loss_mask[np.isin(batch.sequence, samples)].sum()


def test_what_is_not_in_the_loss_is_not_counted(batch):
    batch = batch.with_columns(in_loss=batch.spread(np.array([1, 0, 1])))
    assert batch.sums(aggregate(batch, range(4))).tolist() == pytest.approx([4 / 6, 0, 2 / 6])
    assert batch.sums(aggregate(batch, range(4), "seq-mean-token-mean")).tolist() == [0.5, 0, 0.5]
    assert not aggregate(batch, [2]).any()


def test_token_mean_sequence_mean_constant_length_and_one_of_your_own(batch):
    assert set(aggregate(batch, range(4))) == {0, 1 / 7}
    sequences = aggregate(batch, range(4), "seq-mean-token-mean")
    assert batch.sums(sequences).tolist() == pytest.approx([1 / 3] * 3)
    constant = aggregate(batch, range(4), "seq-mean-token-sum-norm", longest=10)
    assert batch.sums(constant).tolist() == pytest.approx([4 / 30, 1 / 30, 2 / 30])
    assert aggregate(batch, range(4), lambda trajectory: trajectory + 1.0).sum() == 4 * 1 + 1 * 2 + 2 * 3
    with pytest.raises(ConfigError, match="--loss-scale-factor"):
        aggregate(batch, range(4), "seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match="token-mean, seq-mean"):
        aggregate(batch, range(4), "token_sum")
    with pytest.raises(ConfigError, match="no sampled token"):
        aggregate(batch, [])


def test_a_column_that_is_not_there_is_named(batch):
    with pytest.raises(DataError, match=r"no column 'values'.*needs"):
        batch["values"]
    with pytest.raises(LedgerError, match="13 entries"):
        batch.with_columns(old=np.zeros(3))


def test_a_sampled_first_token_is_refused():
    with pytest.raises(LedgerError, match="first token"):
        batch_of(a=[segment([1, 2], [1, 1])])


def test_a_log_probability_that_is_no_number_is_refused():
    broken = segment([1, 2], [0, 1])
    broken.logprobs[1] = np.nan
    with pytest.raises(LedgerError, match="not finite"):
        batch_of(a=[broken])


def test_arrays_of_unequal_length_are_refused():
    broken = segment([1, 2], [0, 1])
    broken.logprobs = broken.logprobs[:1]
    with pytest.raises(LedgerError, match="rollout"):
        batch_of(a=[broken])
