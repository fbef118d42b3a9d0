"""Checkpoints that are written beside the next rollout: what goes on meanwhile, and what waits for them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.checkpoint import CheckpointStore
from agentrl.errors import StorageError
from agentrl.processes.signals import Terminated
from tests.orchestrator.scripted import FLAGS, Rollout, Trainer, check_run, train  # noqa: F401

LONGEST_S = 30.0
EACH_STEP = ("--save-interval", "1", "--eval-interval", "1")


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks and engines did, in order."""
    done: list[str] = []

    def told(actor: type, method: str, name: str) -> None:
        function = getattr(actor, method)

        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            done.append(name)
            result = await function(self, *args, **kwargs)
            done.append(f"{name} done")
            return result

        monkeypatch.setattr(actor, method, call)

    for actor, methods in ((Trainer, ("save", "write", "update", "save_hf")), (Rollout, ("generate", "evaluate"))):
        for method in methods:
            told(actor, method, method)
    return done


def test_the_next_rollout_is_played_and_trained_on_while_a_checkpoint_is_written(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    happened: list[str],
) -> None:
    async def wait_for_the_step_after(self: Trainer) -> None:
        await until(happened, "update done", min(happened.count("save") + 1, 3))
        await asyncio.to_thread(self.writes.finish)
        happened.append("written")

    monkeypatch.setattr(Trainer, "write", wait_for_the_step_after)
    train(*FLAGS, *EACH_STEP, "--num-rollout", "3", "--output-dir", str(tmp_path / "run"))
    check_run(tmp_path / "run", 3)
    saves = [what for what in happened if what in ("save", "written")]
    assert saves == ["save", "written"] * 3, "one at a time"


async def until(happened: list[str], what: str, times: int) -> None:
    """Return when it has happened so often."""
    async with asyncio.timeout(LONGEST_S):
        while happened.count(what) < times:
            await asyncio.sleep(0.001)


def test_without_it_a_run_waits(tmp_path: Path, train: Any, happened: list[str]) -> None:  # noqa: F811
    train(*FLAGS, *EACH_STEP, "--no-async-save", "--num-rollout", "2", "--output-dir", str(tmp_path / "run"))
    check_run(tmp_path / "run", 2)
    assert "write" not in happened


def test_the_best_and_the_oldest_are_settled_when_the_checkpoint_is_there(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    happened: list[str],
) -> None:
    async def wait_for_its_evaluation(self: Trainer) -> None:
        await until(happened, "evaluate done", happened.count("save") + 1)
        await asyncio.to_thread(self.writes.finish)

    monkeypatch.setattr(Trainer, "write", wait_for_its_evaluation)
    flags = (*EACH_STEP, "--keep-last", "1", "--best-metric", "eval/search/success", "--num-rollout", "3")
    train(*FLAGS, *flags, "--output-dir", str(tmp_path / "run"), "--save-hf", str(tmp_path / "model"))
    check_run(tmp_path / "run", 3)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.best().step == 1 and store.steps() == [1, 3]
    last, exported = store.newest().hf_folder, tmp_path / "model"
    assert (last / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_a_disk_that_fills_up_meanwhile_ends_the_run_with_the_sentence(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    happened: list[str],
    capfd: Any,
) -> None:
    write, generate, failed = Trainer.write, Rollout.generate, asyncio.Event()

    async def full(self: Trainer) -> None:
        if happened.count("update") > 1:
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device", "/data/x")
        await write(self)

    async def generate_meanwhile(self: Rollout, step: int, **kwargs: Any) -> Any:
        if step == 2:
            async with asyncio.timeout(LONGEST_S):
                await failed.wait()
        return await generate(self, step, **kwargs)

    monkeypatch.setattr(Trainer, "write", full)
    monkeypatch.setattr(Rollout, "generate", generate_meanwhile)
    with pytest.raises(StorageError, match="disk is full.*some space there, then continue with --load") as caught:
        train(*FLAGS, *EACH_STEP, "--num-rollout", "9", "--output-dir", str(tmp_path / "run"))
    assert caught.value.exit_code == 4
    assert happened.count("update") == 2, "the rollout after it is not trained on"
    assert "saved up to step 1; go on with" in capfd.readouterr().out


@pytest.mark.parametrize("place", ["generate", "evaluate"])
def test_a_run_that_is_asked_to_end_completes_the_checkpoint(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
    place: str,
) -> None:
    asked = asyncio.Event()
    write, play = Trainer.write, getattr(Rollout, place)

    async def wait_for_the_signal(self: Trainer) -> None:
        async with asyncio.timeout(LONGEST_S):
            await asked.wait()
        await asyncio.sleep(0)  # the run is cancelled by now
        await write(self)

    async def end(self: Rollout, step: int, **kwargs: Any) -> Any:
        if not step:
            return await play(self, step, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            async with asyncio.timeout(LONGEST_S):
                await asyncio.Event().wait()
        finally:
            asked.set()

    monkeypatch.setattr(Trainer, "write", wait_for_the_signal)
    monkeypatch.setattr(Rollout, place, end)
    with pytest.raises(Terminated):
        train(*FLAGS, *EACH_STEP, "--num-rollout", "9", "--output-dir", str(tmp_path / "run"))
    out = capfd.readouterr().out
    assert "completing the checkpoint" in out and "saved up to step 1; go on with" in out
    monkeypatch.setattr(Trainer, "write", write)
    monkeypatch.setattr(Rollout, place, play)
    train("--load", str(tmp_path / "run"), "--num-rollout", "3")
    check_run(tmp_path / "run", 3)


@pytest.mark.parametrize("how", ["--async-save", "--no-async-save"])
def test_a_run_that_is_asked_to_end_saves_what_it_learned_since_the_last_checkpoint(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    play = Rollout.generate

    async def end(self: Rollout, step: int, **kwargs: Any) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(LONGEST_S):
                await asyncio.Event().wait()
        return await play(self, step, **kwargs)

    monkeypatch.setattr(Rollout, "generate", end)
    run = tmp_path / "run"
    with pytest.raises(Terminated):
        train(*FLAGS, how, "--save-interval", "2", "--eval-interval", "1", "--num-rollout", "5", f"--output-dir={run}")
    assert CheckpointStore(run / "checkpoints").newest_step() == 3
    monkeypatch.setattr(Rollout, "generate", play)
    train("--load", str(run))
    check_run(run, 5)


def test_a_run_that_is_asked_to_end_while_it_trains_saves_nothing_half_trained(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = Trainer.update

    async def end(self: Trainer, batch: Any, columns: Any, **how: bool) -> Any:
        if len(self.weights) == 2 * len(batch):
            self.weights += batch
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(LONGEST_S):
                await asyncio.Event().wait()
        return await update(self, batch, columns, **how)

    monkeypatch.setattr(Trainer, "update", end)
    run = tmp_path / "run"
    with pytest.raises(Terminated):
        train(*FLAGS, "--save-interval", "9", "--eval-interval", "0", "--num-rollout", "5", "--output-dir", str(run))
    assert CheckpointStore(run / "checkpoints").newest_step() is None


def test_asked_twice_it_ends_at_once(tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    asked = asyncio.Event()

    async def never(self: Trainer) -> None:
        await asked.wait()
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(LONGEST_S):
            await asyncio.Event().wait()

    async def end(self: Rollout, step: int, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(LONGEST_S)
        finally:
            asked.set()

    monkeypatch.setattr(Trainer, "write", never)
    monkeypatch.setattr(Rollout, "evaluate", end)
    with pytest.raises(Terminated):
        train(*FLAGS, "--save-interval", "1", "--eval-interval", "1", "--no-eval-before-train", "--num-rollout", "9",
              "--output-dir", str(tmp_path / "run"))  # fmt: skip
    assert CheckpointStore(tmp_path / "run" / "checkpoints").newest_step() is None


async def test_a_checkpoint_that_is_never_written_holds_up_no_end(tmp_path: Path, caplog: Any) -> None:
    store, trainer, rollout = CheckpointStore(tmp_path, async_save=True), Trainer(), Rollout(tmp_path)
    await store.save(1, trainer=trainer, rollout=rollout)
    await store.saved()
    trainer.write = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    await store.save(2, trainer=trainer, rollout=rollout)
    assert store.saving
    await store.end(0.01)
    assert "is left out" in caplog.text and store.newest().step == 1
