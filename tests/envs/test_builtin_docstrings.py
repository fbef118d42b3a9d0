"""The examples in the docstrings of built-in environments run as they are printed."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["agents", "multi_agent", "textgame.env", "service.env"])
def test_examples_run(name):
    module = importlib.import_module(f"agentrl.envs.{name}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0
