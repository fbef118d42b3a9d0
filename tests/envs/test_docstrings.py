"""The examples in docstrings run as they are printed."""

from __future__ import annotations

import doctest
import importlib

import pytest

BUILT_IN = ("guess", "hint_game", "textgame")
MODULES = ["core", "tool_env", "multi_agent", "wrappers.base", *(f"builtin.{name}" for name in BUILT_IN)]


@pytest.mark.parametrize("name", ["spaces", "tools.base", "envs.builtin.service", *(f"envs.{n}" for n in MODULES)])
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(f"agentrl.{name}"), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0
