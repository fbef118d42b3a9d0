"""`agentrl train --dry-run`: every check of a start, what would run and where, and nothing started or made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.data.run_folder import RunDir

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def dry_run(*flags: str) -> int:
    return main(["train", "--env", "search", "--dry-run", *flags])


def test_what_would_run_is_printed_and_nothing_is_started_or_made(capsys: pytest.CaptureFixture[str]) -> None:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    layout = ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2", "--rollout-num-engines", "2"]
    assert dry_run(*layout, "--num-steps-per-rollout", "2", "--num-rollout", "7", "--save", "kept") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 ranks = tensor 2 × pipeline 1 × data 2" in said and "2 SGLang servers" in said
    assert "16 tasks × 8 episodes = 128 = global batch 64 × 2 steps" in said
    assert "64 episodes, 32 on each data-parallel rank" in said and "at most 65,536 tokens (512 an episode)" in said
    assert "7 rollouts, 14 optimizer steps" in said and "after rollouts 0, 3, 6, 7" in said
    assert f"checkpoints {Path('kept').absolute()}" in said
    assert "nothing was started" in said
    assert not any(Path().iterdir())
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--global-batch-size", "7"], 2, "does not divide"),
        (["--best-metric", "eval/x"], 2, "--best-metric eval/x"),
        (["--output-dir", "taken"], 2, "holds a run already"),
        (["--load", "taken", "--output-dir", "other"], 3, "checkpoint"),
        (["--save-hf", "file/model"], 4, "cannot be written"),
        (["--actor-num-nodes", "2"], 2, "RAY_ADDRESS"),
        (["--data-source-path", "nowhere:Tasks"], 2, "--data-source-path"),
    ],
)
def test_what_a_start_refuses_is_refused(
    flags: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDir.create(load_config(["--env", "search", "--output-dir", "taken", "--no-tensorboard"])).close()
    Path("file").touch()
    assert dry_run(*flags) == code
    assert says in capsys.readouterr().err


def test_a_machine_with_too_little_memory_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run() == 0
    assert "are free" not in capsys.readouterr().out
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 20))
    assert dry_run() == 0
    assert "64.0 MiB are free" in capsys.readouterr().out


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert dry_run("--actor-num-gpus-per-node", "2") == 2
    assert "asks for 3 GPUs" in capsys.readouterr().err


def test_a_run_that_goes_on_is_named_and_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    RunDir.create(load_config(["--env", "search", "--output-dir", str(folder), "--no-tensorboard"])).close()
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert main(["train", "--load", str(folder), "--dry-run"]) == 0
    assert f"run folder {folder}" in " ".join(capsys.readouterr().out.split())
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_an_evaluation_that_is_on_record_is_not_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with RunDir.create(load_config(["--env", "search", "--output-dir", str(folder), "--no-tensorboard"])) as run:
        run.log_evaluation(0, {})
    assert main(["train", "--load", str(folder), "--dry-run"]) == 0
    assert "after rollouts 3, 6" in " ".join(capsys.readouterr().out.split())
