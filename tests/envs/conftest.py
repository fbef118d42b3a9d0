"""The environments of these tests, found the way users' files are found."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def example_spec() -> str:
    """Spec of the example environment of the README."""
    return f"{HERE / 'example_env.py'}:Shopping"


@pytest.fixture(scope="session")
def guess_file() -> str:
    """File with ``Guess`` and ``AsyncGuess``, one environment written both ways."""
    return str(HERE / "guess_envs.py")
