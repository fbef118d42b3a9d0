"""``agentrl export``: the model of a checkpoint as a Hugging Face folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from agentrl.data.files import storage_errors
from agentrl.errors import CheckpointError, ConfigError
from agentrl.trainer.checkpoint import CheckpointStore


def export(run: str | Path, output_dir: str | Path, *, checkpoint: str = "newest") -> Path:
    """Copy the model of a run's checkpoint; it is in the checkpoint already, so no Megatron is started.

    Args:
        run: run folder, or one checkpoint of it.
        output_dir: folder to make; the copy appears under this name only when it is complete.
        checkpoint: ``newest`` (the newest complete one), ``best``, or a number of rollouts.

    Raises:
        ConfigError: ``output_dir`` holds something already.
        CheckpointError: there is no such complete checkpoint.
    """
    target = Path(output_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output-dir {output_dir} holds something already; give a new folder")
    source = CheckpointStore.open_run(run, which=checkpoint)
    if not source.hf_folder.is_dir():
        raise CheckpointError(f"{source.path} holds no model in Hugging Face form")
    partial = target.with_name(target.name + ".partial")
    with storage_errors(target):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source.hf_folder, partial)
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
    return target
