"""Runs from Python: options, code of the session, results, failures. Training itself: ``tests/e2e/test_toolkit.py``."""

import subprocess
import sys
from pathlib import Path

import pytest

import agentrl
from agentrl.runs import plain, spec

SESSION = """
import sys
from pathlib import Path

import agentrl
from agentrl.runs import spec


class Base(agentrl.Env):
    def __init__(self, word="hi"):
        super().__init__()
        self.word = word

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"Say {self.word}.", {}

    def step(self, action):
        return "", float(self.word in action), True, False, {}


class Louder(Base):
    async def astep(self, action):
        observation, reward, *rest = await super().astep(action)
        return observation, 2 * reward, *rest


print(spec(Louder, Path(sys.argv[1])))
"""


def test_a_class_of_the_session_is_found_by_other_processes(tmp_path):
    (tmp_path / "session.py").write_text(SESSION)
    made = subprocess.run(
        [sys.executable, "session.py", str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(agentrl.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    env = agentrl.make(made.stdout.strip(), word="yes")
    assert env.reset(seed=0)[0] == "Say yes."
    assert env.step("yes, I say")[1:4] == (2.0, True, False)


def test_a_class_of_a_module_travels_by_name(tmp_path):
    assert spec(agentrl.PromptEnv, tmp_path) == "agentrl.envs.builtin.prompt:PromptEnv"
    assert plain({"a": (tmp_path, [agentrl.PromptEnv])}, tmp_path) == {
        "a": [str(tmp_path), ["agentrl.envs.builtin.prompt:PromptEnv"]]
    }
    assert list(tmp_path.iterdir()) == []


def test_every_wrong_option_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(agentrl.ConfigError, match="(?s)num_rolout.*num_rollout.*lr"):
        agentrl.train(env="search", num_rolout=3, lr="quick")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_start_raises_its_words_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import agentrl\nclass E(agentrl.Env):\n    def reset(self, **_): return 1/0\n")
    with pytest.raises(agentrl.AgentRLError, match="division by zero"):
        agentrl.train(env="broken.py:E", progress=False)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(agentrl.DataError, match="no config.json"):
        agentrl.Run(tmp_path)
