"""``--colocate`` on the real stack: trainer and engine take turns, with episodes in play and an engine that dies."""

import json
import os
import signal
from pathlib import Path

import pytest
from sockets import command_line

from agentrl.orchestrator.audit import audit
from agentrl.processes.tree import is_running

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


def test_episodes_in_play_wait_for_their_turn_and_a_dead_engine_comes_back_in_its_own(start, tmp_path: Path):
    run = tmp_path / "run"
    log = run / "logs" / "rollout-manager.log"
    command = start(
        *("train", "--env", "search", "--colocate", "--output-dir", str(run), "--num-rollout", "6"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "40"),
        *("--partial-rollout", "--over-sampling-batch-size", "6", "--eval-interval", "0", "--save-interval", "6"),
    )

    def released() -> bool:
        text = log.read_text() if log.exists() else ""
        return text.count("gave their memory back") > 2 and text.rfind("gave their memory") > text.rfind("transfer")

    command.wait_until(released)
    for process in [p for p in command.seen if is_running(p) and "agentrl.engines.server" in command_line(p.pid)]:
        os.kill(process.pid, signal.SIGKILL)
    assert command.wait(300) == 0, command.text[-3000:]
    assert "engine-0 is replaced" in log.read_text() and (run / "logs/engine-0-restart-1.log").exists()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "train/loss" in line]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert sum(step.get("rollout/carried", 0.0) for step in steps) > 0
    assert all(step["data/in_flight"] > 0 for step in steps)
    assert {"time/engines_release", "time/trainer_resume", "time/trainer_release"} <= steps[-1].keys()
    assert audit(run) == [] and command.left_behind() == []
