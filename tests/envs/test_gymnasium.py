"""Gymnasium knows our ids whenever it is imported; importing agentrl loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "order",
    [
        "import agentrl, gymnasium",
        "import gymnasium, agentrl",
        "import agentrl, importlib.util; importlib.util.find_spec('gymnasium'); import gymnasium",
        "import agentrl.envs, gymnasium",
    ],
)
def test_ids_are_known_in_whatever_order_the_two_are_imported(order):
    program = f"{order}; print(gymnasium.spec('agentrl/search-v0').entry_point)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "agentrl.envs.builtin.search:SearchEnv", done.stderr


def test_importing_agentrl_loads_nothing_heavy():
    program = (
        "import sys, agentrl\n"
        "heavy = ('numpy', 'gymnasium', 'torch', 'ray', 'sglang', 'transformers')\n"
        "assert not [name for name in heavy if name in sys.modules], sys.modules.keys()\n"
        "agentrl.ToolEnv, agentrl.tool, agentrl.make, agentrl.PromptEnv, agentrl.spaces, agentrl.rewards\n"
        "assert not [name for name in heavy[2:] if name in sys.modules]\n"
        "assert set(agentrl.__all__) <= set(dir(agentrl))\n"
        "[getattr(agentrl, name) for name in agentrl.__all__]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
