"""A kill before each change of the file system: whatever is left, the next start completes it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.checkpoint import CheckpointStore
from tests.orchestrator.scripted import FLAGS, KILLED, Kill, Rollout, check_run, in_child, train  # noqa: F401

# In CI each seventh change, and all of them where there is time.
thorough = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=[pytest.mark.heavy, pytest.mark.timeout(900)])])
EVERY_STEP = ("--save-interval", "1", "--eval-interval", "1", "--keep-last", "2")
STRAIGHT = (*EVERY_STEP, "--best-metric", "eval/search/success", "--num-rollout", "2")


def killed_everywhere(
    tmp_path: Path,
    stride: int,
    before: Callable[[Path], None],
    work: Callable[[Path], None],
    after: Callable[[Path], None],
) -> int:
    """Do ``work`` once for each ``stride``-th change it makes, end it there, and do ``after``, which checks.

    Returns:
        How many changes it makes.
    """
    base, folder = tmp_path / "base", tmp_path / "copy" / "x"
    base.mkdir()
    before(base)
    at = 1
    while True:
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(base, folder, copy_function=shutil.copy2)
        status, told = in_child(lambda: work(folder), folder, kill=Kill(folder, at))
        assert status in (0, KILLED), told
        ended, problem = in_child(lambda: after(folder), folder)
        assert ended == 0, f"killed before change {at}: {problem}"
        if status == 0:
            return at
        at += stride


def start_again(train: Any, run: Path, *flags: str) -> None:  # noqa: F811
    """What a person types next: the same command where there is no run yet, else ``--load``."""
    if (run / "config.json").is_file():
        train("--load", str(run))
    else:
        train(*FLAGS, *flags, "--output-dir", str(run))


@thorough
def test_a_run_from_start_to_end(tmp_path: Path, stride: int, train: Any) -> None:  # noqa: F811
    def work(folder: Path) -> None:
        train(*FLAGS, *STRAIGHT, "--output-dir", str(folder / "run"), "--save-hf", str(folder / "model"))

    def after(folder: Path) -> None:
        try:
            start_again(train, folder / "run", *STRAIGHT, "--save-hf", str(folder / "model"))
        except Exception as error:
            assert "nothing is left to train" in str(error), error
        check_run(folder / "run", 2)
        assert (folder / "model" / "config.json").is_file()

    assert killed_everywhere(tmp_path, stride, lambda base: None, work, after) > 100


@thorough
def test_while_a_checkpoint_is_written_beside_the_rollout(
    tmp_path: Path,
    stride: int,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rollout is under way until the checkpoint before it is there: all that is written of that is beside it."""
    generate, save = Rollout.generate, CheckpointStore.save
    beside: list[asyncio.Task[None]] = []

    async def saved(self: CheckpointStore, *args: Any, **kwargs: Any) -> None:
        await save(self, *args, **kwargs)
        assert self._saving is not None and not self._saving.done()
        beside[:] = [self._saving]

    async def played(self: Rollout, *args: Any, **kwargs: Any) -> Any:
        made = await generate(self, *args, **kwargs)
        if beside:
            await asyncio.wait(beside)
        return made

    monkeypatch.setattr(CheckpointStore, "save", saved)
    monkeypatch.setattr(Rollout, "generate", played)
    flags = ("--save-interval", "1", "--eval-interval", "0", "--num-rollout", "3", "--keep-last", "2")

    def after(folder: Path) -> None:
        beside.clear()
        try:
            start_again(train, folder / "run", *flags)
        except Exception as error:
            assert "nothing is left to train" in str(error), error
        check_run(folder / "run", 3, every=0)

    work = lambda folder: train(*FLAGS, *flags, "--output-dir", str(folder / "run"))  # noqa: E731
    assert killed_everywhere(tmp_path, stride, lambda base: None, work, after) > 40


@thorough
def test_going_back(tmp_path: Path, stride: int, train: Any) -> None:  # noqa: F811
    """Also saves steps again that are there of the branch that was left, and prunes."""

    def before(base: Path) -> None:
        flags = (*FLAGS, *EVERY_STEP, "--num-rollout", "3", "--keep-last", "0", "--output-dir", str(base / "run"))
        status, told = in_child(lambda: train(*flags), base)
        assert status == 0, told
        config = base / "run" / "config.json"
        config.write_text(config.read_text().replace('"keep_last": 0', '"keep_last": 2'))

    def work(folder: Path) -> None:
        run = folder / "run"
        train("--load", str(run / "checkpoints" / "step_000001"), "--output-dir", str(run))

    def after(folder: Path) -> None:
        try:
            train("--load", str(folder / "run"), "--num-rollout", "4")
        except Exception as error:
            assert "nothing is left to train" in str(error), error
        check_run(folder / "run", 4)

    assert killed_everywhere(tmp_path, stride, before, work, after) > 50


@thorough
def test_forking(tmp_path: Path, stride: int, train: Any) -> None:  # noqa: F811
    def before(base: Path) -> None:
        flags = (*FLAGS, *EVERY_STEP, "--num-rollout", "1", "--output-dir", str(base / "run"))
        status, told = in_child(lambda: train(*flags), base)
        assert status == 0, told

    def work(folder: Path) -> None:
        places = ("--output-dir", str(folder / "fork"), "--save", str(folder / "STORE"))
        train("--load", str(folder / "run"), *places, "--num-rollout", "2")

    def after(folder: Path) -> None:
        try:
            if (folder / "fork" / "config.json").is_file():
                train("--load", str(folder / "fork"))
            else:
                work(folder)
        except Exception as error:
            assert "nothing is left to train" in str(error), error
        check_run(folder / "fork", 2, first=1, checkpoints=folder / "STORE")
        check_run(folder / "run", 1)

    assert killed_everywhere(tmp_path, stride, before, work, after) > 50
