"""``agentrl export``: the model of a checkpoint as a Hugging Face folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from agentrl.data.checkpoint import Checkpoint, CheckpointStore
from agentrl.data.files import atomic_folder
from agentrl.errors import CheckpointError, ConfigError


def export(run: str | Path, output_dir: str | Path, *, checkpoint: str = "newest") -> Path:
    """Copy the model of a run's checkpoint (``newest``, ``best``, or a number of rollouts) to a new folder, where it
    appears only when it is complete. It is in the checkpoint already, so no Megatron is started.
    Raises ConfigError: ``output_dir`` holds something already.
    Raises CheckpointError: there is no such complete checkpoint."""
    target = Path(output_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output-dir {output_dir} holds something already; give a new folder")
    copy_model(CheckpointStore.open_run(run, which=checkpoint), target)
    return target


def copy_model(source: Checkpoint, target: Path) -> None:
    """Copy the model in a checkpoint to ``target``, in place of what is there. Raises CheckpointError, StorageError."""
    if not source.hf_folder.is_dir():
        raise CheckpointError(f"{source.path} holds no model in Hugging Face form")
    with atomic_folder(target) as building:
        shutil.copytree(source.hf_folder, building, dirs_exist_ok=True)
