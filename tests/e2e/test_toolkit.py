"""Environments, roles and held-out evaluation of the toolkit on the real stack, through the command line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from agentrl.data.store import TrajectoryStore

SMALL = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "40"]
ROOT = Path(__file__).parents[2]
BUILT_IN = ["calculator", "python", "textgame", "service", "multi_agent", "gym:FrozenLake-v1"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def test_the_readmes_environment_trains_from_python_beside_other_held_out_sets(start, tmp_path):
    (source,) = (block for block in python_of("README.md") if "class Shopping" in block)
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    (tmp_path / "shop.py").write_text(source, encoding="utf-8")
    # As printed, evaluation apart, but with the class in the session itself, as in a notebook.
    session = "\n".join(python_of("docs/python.md")[:2]).replace("from shop import Shopping", source)
    (tmp_path / "session.py").write_text(session + "print(run)\n", encoding="utf-8")
    command = start(script=tmp_path / "session.py")
    assert command.wait() == 0, command.text[-3000:]
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.name != "session_code")
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(set(line["sets"]) == {"Shopping", "textgame"} for line in lines)
    assert command.left_behind() == []

    out = tmp_path / "best"
    best = start("eval", "--run", str(run), "--checkpoint", "best", "--eval-tasks", "2", "--output-dir", str(out))
    assert best.wait() == 0, best.text[-3000:]
    assert set(json.loads((out / "summary.json").read_text())["sets"]) == {"Shopping", "textgame"}
    again = start("eval", "--run", str(run), "--checkpoint", "best", "--eval-tasks", "2", "--output-dir", str(out))
    assert again.wait() == 0, again.text[-3000:]  # complete already: nothing is played twice
    assert len((out / "trajectories.jsonl").read_text().splitlines()) == 4
    shown = start("show", str(out), "--limit", "1")
    assert shown.wait() == 0 and "Shopping" in shown.text
    compared = start("compare", str(out), str(out))
    assert compared.wait() == 0, compared.text[-3000:]


DUEL = '''
import agentrl


class Duel(agentrl.MultiAgentEnv):
    """Two players write a line each; the longer one wins what the other loses."""

    agents = ("left", "right")

    def reset(self, *, seed=None, options=None):
        ask = {"messages": [{"role": "system", "content": "Write more than the other."}]}
        return "Go.", {"agent": "left", "prompts": {"left": ask, "right": ask}}

    def step(self, action):
        if self.acting == "left":
            self.left = len(action)
            return f"The other wrote {self.left} letters.", 0.0, False, False, {"agent": "right"}
        lead = float((self.left > len(action)) - (self.left < len(action)))
        info = {"agent_rewards": {"left": lead, "right": -lead}, "success": lead > 0}
        return "", 0.0, True, False, info
'''


@pytest.mark.heavy
def test_each_role_trains_under_its_own_advantage(start, tmp_path):
    (tmp_path / "duel.py").write_text(DUEL, encoding="utf-8")
    run = tmp_path / "run"
    command = start(
        "train", "--env", "duel.py:Duel", *SMALL, "--num-rollout", "1", "--eval-interval", "0",
        "--rollout-max-response-len", "120", "--output-dir", str(run),
    )  # fmt: skip
    assert command.wait() == 0, command.text[-3000:]
    columns = ["group_id", "agent", "trajectory_id", "reward", "advantage", "info"]
    rows = TrajectoryStore(run / "trajectories").table("train", columns=columns).to_pylist()
    assert {row["agent"] for row in rows} == {"left", "right"}
    episodes: dict[str, dict[str, float]] = {}
    for row in rows:
        episodes.setdefault(json.loads(row["info"])["episode_id"], {})[row["agent"]] = row["reward"]
    assert len(episodes) == 8 and any(episode["left"] for episode in episodes.values())
    assert all(episode["left"] == -episode["right"] for episode in episodes.values() if len(episode) == 2)
    for group in {row["group_id"] for row in rows}:
        members = [row for row in rows if row["group_id"] == group]
        assert len({row["agent"] for row in members}) == 1, "a baseline is of one role"
        assert abs(np.sum([row["advantage"] for row in members if row["advantage"] is not None])) < 1e-4
    assert command.left_behind() == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_environment_trains(start, tmp_path, name):
    run = tmp_path / "run"
    command = start(
        "train", "--env", name, *SMALL, "--num-rollout", "1", "--eval-interval", "1", "--eval-tasks", "2",
        "--sandbox", "process", "--output-dir", str(run),
    )  # fmt: skip
    assert command.wait() == 0, command.text[-3000:]
    (step,) = [json.loads(s) for s in (run / "metrics.jsonl").read_text().splitlines() if "train/loss" in s]
    assert step["train/logprob_abs_diff_mean"] < 1e-5
    assert command.left_behind() == []
