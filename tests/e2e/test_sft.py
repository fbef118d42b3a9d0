"""``agentrl train --loss-type sft_loss`` for real: Ray and a Megatron rank, and no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_conversations_are_learned_without_an_engine(start, tmp_path: Path):
    data, run = tmp_path / "chats.jsonl", tmp_path / "run"
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = start(
        "train", "--loss-type", "sft_loss", "--train-data", str(data), "--rollout-batch-size", "12", "--lr", "2e-4",
        "--num-rollout", "2", "--save-interval", "2", "--eval-data", str(data), "--eval-interval", "2",
        "--output-dir", str(run),
    )  # fmt: skip
    assert command.wait() == 0, command.text[-3000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, second = [line["train/loss"] for line in lines if "train/loss" in line]
    before, after = [line["eval/nll"] for line in lines if "eval/nll" in line]
    assert first == pytest.approx(before, rel=1e-5) and second < first and after < second
    assert (run / "checkpoints" / "step_000002" / "hf" / "config.json").is_file()
    logs = {path.name for path in (run / "logs").iterdir()}
    assert {"driver.log", "trainer-0.log"} <= logs
    assert not [name for name in logs if name.startswith(("engine", "router", "rollout"))]
