"""Sessions of every tier that works on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sandbox_sessions import Open, failure_of, opened


@pytest.fixture(params=["process", "bubblewrap"])
def tier(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and (failure := failure_of("bubblewrap", None)):
        pytest.skip(f"bubblewrap does not work here: {failure}")
    return request.param


@pytest.fixture
def open_session(tier: str) -> Iterator[Open]:
    """Opens sessions of each tier; they are closed at the end, and nothing of them is left."""
    with opened(tier) as open_one:
        yield open_one


@pytest.fixture
def open_process() -> Iterator[Open]:
    """The same for what is one piece of code in every tier."""
    with opened("process") as open_one:
        yield open_one


@pytest.fixture
def open_bubblewrap() -> Iterator[Open]:
    """The same for what only a boundary stops."""
    if failure := failure_of("bubblewrap", None):
        pytest.skip(f"bubblewrap does not work here: {failure}")
    with opened("bubblewrap") as open_one:
        yield open_one
