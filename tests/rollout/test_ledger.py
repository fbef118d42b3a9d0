import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import LedgerError
from agentrl.rollout.ledger import TokenLedger
from agentrl.types import Generation


def ids(*values):
    return np.array(values, np.int32)


def sampled(*values, version=3, **kwargs):
    n = len(values)
    logprobs = -0.1 * np.arange(1, n + 1, dtype=np.float32)
    return Generation(ids(*values), logprobs, np.full(n, version, np.int32), "stop", **kwargs)


def test_arrays_follow_provenance():
    ledger = TokenLedger()
    ledger.start(ids(1, 2, 3))
    ledger.append_sampled(sampled(10, 11))
    ledger.append_env(ids(4, 5))
    ledger.append_sampled(sampled(12, version=4))
    (segment,) = ledger.segments()
    assert segment.tokens.tolist() == [1, 2, 3, 10, 11, 4, 5, 12]
    assert segment.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert np.allclose(segment.logprobs, [0, 0, 0, -0.1, -0.2, 0, 0, -0.1])
    assert segment.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4]
    assert segment.prompt_length == 3
    assert [a.dtype.name for a in (segment.tokens, segment.loss_mask, segment.logprobs, segment.versions)] == [
        "int32",
        "uint8",
        "float32",
        "int32",
    ]


def test_what_follows_the_last_sampled_id_is_left_out():
    ledger = TokenLedger()
    ledger.start(ids(1))
    ledger.append_env(ids(2))
    ledger.append_sampled(sampled(10))
    ledger.append_env(ids(4, 5))
    (segment,) = ledger.segments()
    assert segment.tokens.tolist() == [1, 2, 10]
    assert segment.prompt_length == 2
    assert ledger.ids.tolist() == [1, 2, 10, 4, 5]


def test_a_segment_without_sampled_ids_is_not_trained():
    ledger = TokenLedger()
    ledger.start(ids(1))
    ledger.append_sampled(sampled(10))
    ledger.new_segment(ids(1, 10, 6))
    assert [s.tokens.tolist() for s in ledger.segments()] == [[1, 10]]
    ledger.append_sampled(sampled(11))
    assert [s.loss_mask.tolist() for s in ledger.segments()] == [[0, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    "bad",
    [
        Generation(ids(1), np.array([np.nan], np.float32), ids(0), "stop"),
        Generation(ids(1), np.array([-np.inf], np.float32), ids(0), "stop"),
        Generation(ids(1), np.array([0.5], np.float32), ids(0), "stop"),
        Generation(ids(1), np.array([-1.0], np.float32), ids(-1), "stop"),
        Generation(ids(1), np.array([-1.0, -1.0], np.float32), ids(0), "stop"),
        Generation(ids(1), np.array([-1.0], np.float32), ids(0, 0), "stop"),
        Generation(ids(-4), np.array([-1.0], np.float32), ids(0), "stop"),
        Generation(np.array([1.5]), np.array([-1.0], np.float32), ids(0), "stop"),
        Generation(ids(1), np.array([-1.0], np.float32), ids(0), "stop", prompt_tokens=7),
    ],
)
def test_a_broken_answer_is_refused(bad):
    ledger = TokenLedger()
    ledger.start(ids(1, 2))
    with pytest.raises(LedgerError):
        ledger.append_sampled(bad)
    assert ledger.ids.tolist() == [1, 2]


def test_order_of_calls():
    ledger = TokenLedger()
    for call in (lambda: ledger.ids, lambda: ledger.append_env(ids(1)), lambda: ledger.new_segment(ids(1))):
        with pytest.raises(LedgerError):
            call()
    with pytest.raises(LedgerError, match="empty"):
        ledger.start(ids())
    ledger.start(ids(1))
    with pytest.raises(LedgerError, match="twice"):
        ledger.start(ids(1))


def test_ids_cannot_be_written_through():
    ledger = TokenLedger()
    ledger.start(ids(1, 2))
    with pytest.raises(ValueError):
        ledger.ids[0] = 5


_EVENT = st.tuples(st.sampled_from(["sampled", "env", "segment"]), st.lists(st.integers(0, 2**31 - 1), max_size=400))


@settings(max_examples=60, deadline=None)
@given(prompt=st.lists(st.integers(0, 1000), min_size=1, max_size=300), events=st.lists(_EVENT, max_size=12))
def test_invariants_hold_for_any_history(prompt, events):
    ledger = TokenLedger()
    ledger.start(ids(*prompt))
    total, expected = 0, []
    for kind, values in events:
        before = ledger.ids.tolist()
        if kind == "segment":
            ledger.new_segment(ids(7, *before))
            continue
        if kind == "sampled":
            ledger.append_sampled(sampled(*values, version=0) if len(values) < 5 else _flat(values))
            total += len(values)
            expected += values
        else:
            ledger.append_env(ids(*values))
        assert ledger.ids.tolist() == before + values
    segments = ledger.segments()
    assert total == sum(s.num_sampled for s in segments)
    trained = [t for s in segments for t in s.tokens[s.loss_mask == 1].tolist()]
    assert trained == expected
    for s in segments:
        assert len(s.tokens) == len(s.loss_mask) == len(s.logprobs) == len(s.versions)
        assert (s.versions[s.loss_mask == 0] == -1).all() and (s.versions[s.loss_mask == 1] >= 0).all()
        assert (s.logprobs[s.loss_mask == 0] == 0).all()
        assert not s.loss_mask[: s.prompt_length].any() and s.loss_mask[s.prompt_length] == 1


def _flat(values):
    n = len(values)
    return Generation(ids(*values), np.full(n, -1.0, np.float32), np.zeros(n, np.int32), "stop")
