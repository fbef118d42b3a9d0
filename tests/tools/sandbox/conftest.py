"""Sessions of every tier that works on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sandbox_sessions import VARIANTS, Open, opened, works


@pytest.fixture(params=list(VARIANTS))
def open_session(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens sessions of each variant; they are closed at the end, and nothing of them is left."""
    if request.param == "bubblewrap" and not works("bubblewrap"):
        pytest.skip("bubblewrap does not work here")
    with opened(request.param) as open_one:
        yield open_one


@pytest.fixture
def open_process() -> Iterator[Open]:
    """The same for what is one piece of code in every tier."""
    with opened("process") as open_one:
        yield open_one
