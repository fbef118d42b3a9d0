"""The text space."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import create_empty_array, create_shared_memory

from agentrl.spaces import Unicode


def test_any_text_up_to_a_length_is_inside():
    space = Unicode(10, min_length=1)
    for text in ("a", "naïve", "你好", "\ud800\0\n", np.str_("x")):
        assert text in space
    for other in ("", "x" * 11, b"x", None, 3, ["x"]):
        assert other not in space


def test_samples_are_short_seeded_and_inside():
    space = Unicode(2**24, seed=1)
    samples = [space.sample() for _ in range(200)]
    assert all(s in space and len(s) <= 64 for s in samples)
    assert Unicode(2**24, seed=1).sample() == samples[0]
    assert all(len(Unicode(3, min_length=3, seed=s).sample()) == 3 for s in range(20))
    assert len(space.sample(mask=(5, None))) == 5


def test_equality_repr_and_pickling():
    assert Unicode(5) == Unicode(5) != Unicode(6)
    assert repr(Unicode(5)) == "Unicode(0, 5)"
    assert pickle.loads(pickle.dumps(Unicode(5))) == Unicode(5)


def test_vector_forms():
    assert create_empty_array(Unicode(5), n=2) == ("", "")
    with pytest.raises(CustomSpaceError, match="shared_memory=False"):
        create_shared_memory(Unicode(5), n=2)
