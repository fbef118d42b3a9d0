import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrl.data.account import TaskAccount, load_source
from agentrl.errors import ConfigError, DataError
from agentrl.tasks.source import TaskSource
from agentrl.types import Group, Task


def buffer(size=None):
    return TaskAccount(TaskSource("search", size, seed=0))


def test_the_way_of_a_draw(make_group):
    buf = buffer()
    draws = buf.get_samples(3)
    assert len({d.group_id for d in draws}) == 3
    buf.add_samples([make_group(d) for d in draws])
    buf.mark_trained(d.group_id for d in draws[:2])
    assert buf.counts == {"issued": 3, "in_flight": 0, "given_back": 0, "ready": 1, "trained": 2, "dropped": 0}


def test_given_back_comes_first_and_keeps_its_id():
    buf = buffer()
    first, second = buf.get_samples(2)
    buf.give_back([first.group_id])
    assert buf.get_samples(2)[0] == first


def test_wrong_moves_are_refused(make_group):
    buf = buffer()
    (draw,) = buf.get_samples(1)
    buf.mark_trained([draw.group_id])
    for move in (buf.mark_trained, buf.give_back, buf.drop):
        with pytest.raises(DataError, match=draw.group_id):
            move([draw.group_id])
    with pytest.raises(DataError, match="not in flight"):
        buf.add_samples([make_group(draw)])
    (draw,) = buf.get_samples(1)
    buf.add_samples([make_group(draw)])
    with pytest.raises(DataError, match="it finished before"):
        buf.add_samples([make_group(draw)])


def test_the_account_does_not_grow_with_the_run():
    buf = buffer()
    for _ in range(50):
        buf.mark_trained(d.group_id for d in buf.get_samples(8))
    assert len(json.dumps(buf.state_dict())) < 300


def test_a_saved_account_must_add_up():
    buf = buffer()
    buf.get_samples(2)
    state = buf.state_dict()
    with pytest.raises(DataError, match="does not add up"):
        buffer().load_state_dict(state | {"trained": 1})


class Account(RuleBasedStateMachine):
    """Any history of draws, ends, failures, saves and kills: every task trained at most once, none lost."""

    def __init__(self):
        super().__init__()
        self.buf = buffer(7)
        self.trained, self.dropped, self.flying, self.ready = Counter(), set(), {}, {}
        self.saved = None

    @rule(n=st.integers(0, 6))
    def draw(self, n):
        draws = self.buf.get_samples(n)
        assert len(draws) == n
        for d in draws:
            assert d.group_id not in self.flying and not self.trained[d.group_id]
            self.flying[d.group_id] = d

    def _some(self, data, *, ready=True):
        there = sorted({**self.flying, **self.ready} if ready else self.flying)
        chosen = data.draw(st.lists(st.sampled_from(there), unique=True))
        return [self.flying.pop(group_id, None) or self.ready.pop(group_id) for group_id in chosen]

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data):
        draws = self._some(data, ready=False)
        self.buf.add_samples([Group(d.group_id, d.task, []) for d in draws])
        self.ready.update((d.group_id, d) for d in draws)

    @precondition(lambda self: self.flying or self.ready)
    @rule(data=st.data())
    def give_back(self, data):
        self.buf.give_back([d.group_id for d in self._some(data)])

    @precondition(lambda self: self.flying or self.ready)
    @rule(data=st.data())
    def drop(self, data):
        gone = [d.group_id for d in self._some(data)]
        self.buf.drop(gone)
        self.dropped.update(gone)

    @precondition(lambda self: self.flying or self.ready)
    @rule(data=st.data())
    def train(self, data):
        done = [d.group_id for d in self._some(data)]
        self.buf.mark_trained(done)
        self.trained.update(done)

    @rule()
    def save(self):
        self.saved = json.loads(json.dumps(self.buf.state_dict())), self.trained.copy(), set(self.dropped)

    @precondition(lambda self: self.saved)
    @rule()
    def kill_and_resume(self):
        state, self.trained, self.dropped = self.saved[0], self.saved[1].copy(), set(self.saved[2])
        self.buf = buffer(7)
        self.buf.load_state_dict(state)
        self.flying, self.ready = {}, {}

    @invariant()
    def everything_is_accounted_for(self):
        counts = self.buf.counts
        assert counts["issued"] == sum(counts.values()) - counts["issued"]
        assert counts["trained"] == sum(self.trained.values()) and max(self.trained.values(), default=1) == 1
        assert counts["dropped"] == len(self.dropped)
        assert (counts["in_flight"], counts["ready"]) == (len(self.flying), len(self.ready))

    def teardown(self):
        """Run to the end of the epoch in hand: the trained and dropped tasks are exactly the first ones issued."""
        while True:
            draws = self.buf.get_samples(1)
            self.buf.mark_trained([draws[0].group_id])
            self.trained.update([draws[0].group_id])
            counts = self.buf.counts
            if not (counts["given_back"] or counts["in_flight"] or counts["ready"]):
                break
            for group_id in (*self.flying, *self.ready):
                self.buf.mark_trained([group_id])
                self.trained.update([group_id])
            self.flying.clear()
            self.ready.clear()
        done = set(self.trained) | self.dropped
        assert done == {f"g{i:08d}" for i in range(self.buf.counts["issued"])}
        assert max(self.trained.values()) == 1 and not set(self.trained) & self.dropped


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


SOURCE = """
from agentrl.types import Task
class Source:
    def __init__(self, config):
        self.left = 3
        self.seen = []
    def get_samples(self, num_samples):
        n = min(num_samples, self.left)
        self.left -= n
        return [Task(f"mine/{self.left + i}", 0) for i in range(n)]
    def add_samples(self, samples):
        self.seen += samples
class Wrong:
    def __init__(self, config): pass
"""


def test_a_source_by_path(tmp_path, make_group):
    (tmp_path / "mine.py").write_text(SOURCE)
    source = load_source(f"{tmp_path}/mine.py:Source", None)
    buf = TaskAccount(source)
    draws = buf.get_samples(5)
    assert [d.task.task_id for d in draws] == ["mine/0", "mine/1", "mine/2"] and buf.get_samples(1) == []
    buf.add_samples([make_group(draws[0])])
    assert len(source.seen) == 1
    other = TaskAccount(load_source(f"{tmp_path}/mine.py:Source", None))
    other.load_state_dict(buf.state_dict())
    assert [d.task for d in other.get_samples(3)] == [d.task for d in draws]
    with pytest.raises(DataError, match="get_samples"):
        load_source(f"{tmp_path}/mine.py:Wrong", None)
    with pytest.raises(ConfigError, match="Sorce"):
        load_source(f"{tmp_path}/mine.py:Sorce", None)


def test_a_source_must_give_tasks():
    class Odd:
        def get_samples(self, num_samples):
            return ["text"]

        def add_samples(self, samples):
            """Nothing."""

    with pytest.raises(DataError, match="gave str"):
        TaskAccount(Odd()).get_samples(1)
    assert isinstance(Task("a", 0), Task)
