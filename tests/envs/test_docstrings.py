"""The examples in docstrings run as they are printed."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["envs.core", "envs.spaces", "envs.tool_env", "envs.wrapper", "tools.base"])
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(f"agentrl.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
