"""A data source that ends before --num-rollout: the run is over, not broken."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentrl.config import load_config
from agentrl.engines.world import World
from agentrl.orchestrator import loop
from agentrl.orchestrator.manager import Generated
from agentrl.progress import Progress
from tests.orchestrator.scripted import Trainer

METRICS = {"rollout/reward": 0.0, "rollout/tokens_per_s": 0.0, "rollout/success": 0.0, "rollout/turns": 1.0}


@pytest.mark.parametrize(
    ("batches", "start", "happened"),
    [
        # Saved every 2 and evaluated every 2: after 3 both are missing, after 2 neither is.
        (3, 0, ["evaluate 0", "save 2", "evaluate 2", "evaluate 3", "save 3"]),
        (2, 0, ["evaluate 0", "save 2", "evaluate 2"]),
        (0, 0, ["evaluate 0"]),
        (0, 2, ["evaluate 2"]),  # --load of a run that had come to the end
    ],
)
async def test_the_run_ends_with_an_evaluation_and_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, batches: int, start: int, happened: list[str]
) -> None:
    log: list[str] = []
    evaluated: list[dict[str, Any]] = []
    saved = [start] if start else []

    async def generate(step: int, *, progress: Progress) -> Generated | None:
        return Generated(dict(METRICS), []) if step < batches else None

    async def done(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {}

    async def save(version: int, **kwargs: Any) -> None:
        log.append(f"save {version}")
        saved.append(version)

    async def evaluate(rollout: Any, step: int, **kwargs: Any) -> None:
        log.append(f"evaluate {step}")
        evaluated.append({"step": step})

    monkeypatch.setattr(loop, "evaluate", evaluate)
    out = io.StringIO()
    cfg = load_config(["--env", "search", "--num-rollout", "9", "--save-interval", "2", "--eval-interval", "2"])
    await loop.training_loop(
        cfg,
        start=start,
        trainer=Trainer(),
        rollout=SimpleNamespace(update_weights=done, generate=generate, mark_trained=done),
        checkpoints=SimpleNamespace(
            save=save, saved=done, check=lambda: None, saving=False, newest_step=lambda: max(saved, default=None)
        ),
        run=SimpleNamespace(evaluations=lambda: evaluated, log_metrics=lambda *a: None),
        progress=Progress("x", 9, console=Console(file=out, width=200)),
        world=World(),
    )
    assert log == happened
    assert f"no more tasks in the data source: done after {start + batches} of 9 rollouts" in out.getvalue()
