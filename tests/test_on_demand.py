"""A package's names are those of its imports for type checkers, imported when first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentrl
from agentrl import rewards, tools


@pytest.mark.parametrize("package", [agentrl, tools])
def test_every_name_is_there(package):
    assert len(package.__all__) > 10
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(AttributeError, match="module 'agentrl' has no attribute 'Tol'"):
        agentrl.Tol  # noqa: B018
    assert agentrl.rewards is rewards


def test_nothing_is_imported_before_it_is_used():
    program = (
        "import sys, agentrl\n"
        "assert not {'numpy', 'agentrl.tools', 'pydantic'} & set(sys.modules)\n"
        "agentrl.tools\n"
        "assert 'agentrl.tools.builtin.search' not in sys.modules\n"
        "from agentrl import *\n"
        "assert ToolEnv.__module__ == 'agentrl.envs.tool_env'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
