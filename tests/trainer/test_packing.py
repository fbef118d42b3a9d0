"""The schedule's invariants, for any lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.families.flops import Flops
from agentrl.trainer import packing
from agentrl.trainer.packing import schedule

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)
FLOPS = Flops(token=1000, pair=20, logits=300)
"""A sequence of 100 tokens costs as much for its pairs as for its tokens."""


def work(sizes):
    return [FLOPS.sequence(n, n // 3) for n in sizes]


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(1, 400), st.integers(1, 4), st.booleans())
def test_every_sample_once_and_ranks_alike(sizes, dp, limit, multiple, by_flops):
    costs = work(sizes) if by_flops else None
    (step,) = schedule(sizes, costs=costs, dp=dp, max_tokens=limit, multiple_of=multiple)
    assert step.samples == list(range(len(sizes)))
    assert len(step.ranks) == dp
    assert {len(rank) for rank in step.ranks} == {step.num_micro_batches}
    assert step.num_micro_batches % multiple == 0
    for rank in step.ranks:
        for batch in rank:
            assert sum(sizes[i] for i in batch) <= limit or len(batch) == 1


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(1, 8))
def test_micro_batch_size_limits_samples(sizes, dp, limit):
    (step,) = schedule(sizes, dp=dp, micro_batch_size=limit)
    assert step.samples == list(range(len(sizes)))
    assert {len(rank) for rank in step.ranks} == {step.num_micro_batches}
    assert all(len(batch) <= limit for rank in step.ranks for batch in rank)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=50), st.integers(1, 4), st.data())
def test_a_trajectory_is_never_cut_by_steps(keys, dp, data):
    steps = data.draw(st.integers(1, len(set(keys))))
    plan = schedule([7] * len(keys), dp=dp, max_tokens=50, num_steps=steps, keys=keys)
    assert len(plan) == steps
    assert sorted(i for step in plan for i in step.samples) == list(range(len(keys)))
    seen = [{keys[i] for i in step.samples} for step in plan]
    assert all(seen)
    assert sum(len(s) for s in seen) == len(set(keys))
    counts = [len(s) for s in seen]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(10, 1000), min_size=64, max_size=200), st.integers(2, 4))
def test_ranks_have_equal_work_whatever_the_lengths(sizes, dp):
    costs = work(sizes)
    (step,) = schedule(sizes, costs=costs, dp=dp, max_tokens=2000)
    loads = [sum(costs[i] for batch in rank for i in batch) for rank in step.ranks]
    assert max(loads) - min(loads) <= max(costs), "apart by less than a sample"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(50, 250), min_size=64, max_size=200), st.integers(2, 4))
def test_ranks_are_balanced(sizes, dp):
    for costs in (sizes, work(sizes)):
        (step,) = schedule(sizes, costs=costs, dp=dp, max_tokens=2000)
        loads = [sum(costs[i] for batch in rank for i in batch) for rank in step.ranks]
        assert max(loads) <= 1.05 * sum(loads) / dp


def test_equal_tokens_are_not_equal_work():
    """A rank with one long sequence has fewer tokens than one with many short ones."""
    sizes = [800, *[100] * 36]
    (step,) = schedule(sizes, costs=work(sizes), dp=2, max_tokens=1000)
    tokens = [sum(sizes[i] for batch in rank for i in batch) for rank in step.ranks]
    costs = [sum(work(sizes)[i] for batch in rank for i in batch) for rank in step.ranks]
    assert min(tokens) < 0.8 * max(tokens) and min(costs) > 0.95 * max(costs)


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    (step,) = schedule([5, 6], dp=4, max_tokens=100)
    assert [len(batch) for rank in step.ranks for batch in rank].count(0) == 2


def test_as_few_micro_batches_as_needed():
    (step,) = schedule([10] * 10, dp=1, max_tokens=50)
    assert step.num_micro_batches == 2


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"lengths": [], "max_tokens": 5}, "nothing to train on"),
        ({"lengths": [3, 0], "max_tokens": 5}, "nothing to train on"),
        ({"lengths": [3], "max_tokens": 5, "num_steps": 2}, "num-steps-per-rollout"),
    ],
)
def test_errors_name_what_is_wrong(kwargs, text):
    sizes = kwargs.pop("lengths")
    with pytest.raises(ConfigError, match=text):
        schedule(sizes, **kwargs)


def test_long_samples_are_packed_in_few_attempts(monkeypatch):
    attempts, fill = [], packing._fill
    monkeypatch.setattr(packing, "_fill", lambda *args: attempts.append(1) or fill(*args))
    for length in (5000, 3000, 2100):
        attempts.clear()
        (step,) = packing.schedule([length] * 1024, dp=2, max_tokens=8192)
        assert len(attempts) < 24
        assert step.num_micro_batches * 2 <= 1.05 * 1024 / (8192 // length) + 2
