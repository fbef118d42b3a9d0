"""Dictionaries that share their keys are dictionaries, and smaller."""

import copy
import json
import pickle
import tracemalloc

from agentrl.shared_keys import SharedKeys


def test_they_are_ordinary_dictionaries():
    make = SharedKeys()
    one = make(role="user", content="a")
    two = make(role="user", content="b", name="c")  # some keys may be missing
    assert type(one) is dict and one == {"role": "user", "content": "a"}
    assert list(two) == ["role", "content", "name"]
    one["more"] = 1
    assert json.loads(json.dumps(one)) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert make(role="x") == {"role": "x"} and "more" not in two


def test_they_take_less_memory():
    def held(make):
        make(), make()
        tracemalloc.start()
        kept = [make() for _ in range(2000)]
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size / len(kept)

    make = SharedKeys()
    plain = held(lambda: {"role": "user", "content": "a", "name": "b"})
    assert held(lambda: make(role="user", content="a", name="b")) < 0.75 * plain
