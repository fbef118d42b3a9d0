"""What the driver does before and after the processes of a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config import load_config
from agentrl.data.run_folder import RunDir
from agentrl.errors import ConfigError
from agentrl.evaluation.metrics import summarize
from agentrl.orchestrator.launch import check_targets, report, train
from agentrl.progress import Progress, before_after
from agentrl.types import StopReason, Task, Trajectory


def summary(*reasons: StopReason) -> dict:
    episodes = [
        Trajectory(f"t{i}", f"g{i}", Task(f"task/{i}", i), [], [], success=True, stop_reason=reason)
        for i, reason in enumerate(reasons)
    ]
    return summarize("x", "test", episodes, 1.0).to_dict()


@pytest.mark.parametrize(
    ("before", "after", "compared"),
    [
        ({"a": summary(StopReason.DONE)}, {"a": summary(StopReason.DONE)}, True),
        ({"a": summary(StopReason.ENGINE_ERROR)}, {"a": summary(StopReason.DONE)}, False),
        ({"a": summary(StopReason.DONE)}, {"b": summary(StopReason.DONE)}, False),
    ],
)
def test_the_closing_report_compares_what_can_be_compared(
    tmp_path: Path, before: dict, after: dict, compared: bool
) -> None:
    cfg = load_config(["--env", "search", "--output-dir", str(tmp_path / "run"), "--no-tensorboard"])
    out = io.StringIO()
    with RunDir.create(cfg) as run:
        run.log_evaluation(0, before)
        run.log_evaluation(2, after)
        report(run, Progress("x", 2, console=Console(file=out, width=120)))
    assert ("Held-out tasks, before → after 2 steps" in out.getvalue()) == compared
    assert "done in" in out.getvalue()


def test_the_closing_table_says_when_it_was_measured_and_nothing_that_it_does_not_know() -> None:
    out = io.StringIO()
    one, two = summary(StopReason.DONE), summary(StopReason.DONE, StopReason.DONE)
    console = Console(file=out, width=120)
    console.print(before_after([("a", two, two), ("b", two, two)], (1, 3)))
    assert "Held-out tasks, after 1 step → after 3 steps" in out.getvalue()
    assert "2 tasks of each set, 95 % interval" in out.getvalue() and "greedy" not in out.getvalue()
    console.print(before_after([("a", one, two)], (0, 1)))
    assert "before → after 1 step " in out.getvalue()


def test_a_folder_with_another_runs_checkpoints_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "saved" / "step_000040").mkdir(parents=True)
    cfg = load_config(["--env", "search", "--save", str(tmp_path / "saved"), "--output-dir", str(tmp_path / "run")])
    with pytest.raises(ConfigError, match="up to step 40"):
        train(cfg)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["not a model", "the model itself", "an earlier export", "empty"])
def test_the_export_replaces_nothing_but_an_export(tmp_path: Path, case: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    cfg = load_config(["--env", "search", "--save-hf", str(target)])
    if case == "not a model":
        (target / "thesis.tex").touch()
    elif case != "empty":
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").touch()
    if case == "the model itself":
        cfg = cfg.replace(hf_checkpoint=str(tmp_path / "." / "target"))
    if case in ("empty", "an earlier export"):
        check_targets(cfg, run=None)
    else:
        with pytest.raises(ConfigError, match="--save-hf .*Choose another"):
            check_targets(cfg, run=None)
