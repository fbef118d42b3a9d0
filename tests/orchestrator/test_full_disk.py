"""A full disk: exit code 4 and one sentence, whatever was being written, and by whom."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import StorageError
from agentrl.processes.signals import LogFile
from tests.orchestrator.scripted import FLAGS, check_run, train  # noqa: F401
from tests.orchestrator.test_kills import start_again


def test_a_library_that_writes_tensors_says_so_like_any_other(tmp_path: Path, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    from safetensors import SafetensorError

    from agentrl.data import tensor_file

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="No such file") as caught:  # the real one, and what it says
        tensor_file.save_tensors({"a": torch.zeros(3)}, tmp_path / "nowhere" / "x")
    assert caught.value.errno == errno.ENOENT
    monkeypatch.setattr(tensor_file, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        tensor_file.save_tensors({}, tmp_path / "x")
    assert caught.value.errno == errno.ENOSPC


async def test_a_full_disk_crosses_ray_as_one_sentence() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    from agentrl.orchestrator.handles import within

    for cause in (OSError(errno.ENOSPC, "full", "/data/x"), StorageError("/data/x: the disk is full: free some space")):
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(exceptions.RayTaskError("save", "ray::TrainActor.save() ...", cause))
        with pytest.raises(StorageError, match="/data/x.*the disk is full.*free some space"):
            await within("saving the trainer", 10, failed)


@pytest.mark.parametrize("place", ["Trainer.save", "Trainer.update", "Rollout.generate"])
def test_a_run_ends_with_the_sentence_and_no_stack(
    tmp_path: Path,
    train: Any,  # noqa: F811
    monkeypatch: Any,
    capfd: Any,
    place: str,
) -> None:
    async def full(*args: Any, **kwargs: Any) -> None:
        logging.getLogger("agentrl").error("to the full disk as well")
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x")

    monkeypatch.setattr(f"tests.orchestrator.scripted.{place}", full)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "driver.log").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="disk is full.*some space there, then continue with --load") as caught:
        train(*FLAGS, "--num-rollout", "1", "--output-dir", str(tmp_path / "run"))
    assert caught.value.exit_code == 4
    out, err = capfd.readouterr()
    assert "begin again with: agentrl train --load" in out and "Logging error" not in out + err and not err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_whatever_is_written_when_the_disk_fills_the_run_ends_in_a_sentence_and_goes_on_from_there(
    small_disk: Path,
    train: Any,  # noqa: F811
) -> None:
    """A real disk, full but for a page, two, three: checkpoints, trajectories, metrics, TensorBoard, logs."""
    run, ballast = small_disk / "run", small_disk / "ballast"
    flags = [*FLAGS, "--tensorboard", "--num-rollout", "3", "--save-interval", "1", "--eval-interval", "1"]
    whole = 0
    for pages in range(1, 100):
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096 * pages))
        try:
            train(*flags, "--output-dir", str(run))
            whole += 1
        except StorageError as error:
            assert f"the disk is full ({small_disk}: " in str(error) and "then continue with --load" in str(error)
            ballast.unlink()
            start_again(train, run, *flags[len(FLAGS) :])
        check_run(run, 3)
        shutil.rmtree(run)
        if whole == 2:
            break
    assert pages > 10


def test_a_log_takes_what_is_no_text(tmp_path: Path) -> None:
    handler = LogFile(tmp_path / "log", encoding="utf-8", errors="backslashreplace")
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "half a letter: \ud800", None, None))
    handler.close()
    assert (tmp_path / "log").read_text() == "half a letter: \\ud800\n"
