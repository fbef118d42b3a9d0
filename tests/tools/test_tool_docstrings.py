"""Examples in the docstrings of the tools run."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["builtin.calculator", "definitions", "builtin.search"])
def test_examples_run(name):
    module = importlib.import_module(f"agentrl.tools.{name}")
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.attempted and not results.failed
