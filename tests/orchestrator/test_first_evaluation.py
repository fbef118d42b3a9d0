"""The model that a run starts from is evaluated by the engines alone, while the trainer still loads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import CheckpointError
from tests.orchestrator.scripted import FLAGS, Rollout, Trainer, check_run, train  # noqa: F401

RUN = (*FLAGS, "--num-rollout", "1", "--eval-interval", "1", "--save-interval", "1")


def test_it_does_not_wait_for_the_trainer(tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    order: list[str] = []
    evaluate, publish = Rollout.evaluate, Trainer.publish
    evaluated = asyncio.Event()

    async def evaluate_first(self: Rollout, step: int, **kwargs: Any) -> Any:
        order.append(f"evaluation {step}")
        evaluated.set()
        return await evaluate(self, step, **kwargs)

    async def ready(self: Trainer) -> None:
        async with asyncio.timeout(30):
            await evaluated.wait()
        order.append("trainer")

    async def publish_next(self: Trainer, version: int) -> int:
        order.append(f"version {version}")
        return await publish(self, version)

    monkeypatch.setattr(Rollout, "evaluate", evaluate_first)
    monkeypatch.setattr(Trainer, "ready", ready)
    monkeypatch.setattr(Trainer, "publish", publish_next)
    train("--output-dir", str(tmp_path / "run"), *RUN)
    assert order == ["evaluation 0", "trainer", "version 0", "version 1", "evaluation 1"]
    check_run(tmp_path / "run", 1)


def test_a_trainer_that_cannot_start_ends_it(tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ended = []

    async def evaluate_for_ever(self: Rollout, step: int, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(step)
            raise

    async def refuse(self: Trainer) -> None:
        await asyncio.sleep(0)
        raise CheckpointError("no such tensors")

    monkeypatch.setattr(Rollout, "evaluate", evaluate_for_ever)
    monkeypatch.setattr(Trainer, "ready", refuse)
    with pytest.raises(CheckpointError, match="no such tensors"):
        train("--output-dir", str(tmp_path / "run"), *RUN)
    assert ended == [0]
