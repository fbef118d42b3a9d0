"""Folders of Megatron's checkpoints: which is one, and where in it the distributed checkpoint lies. Reads no tensor.

::

    DIR/latest_checkpointed_iteration.txt   the number of an iteration, or `release`
    DIR/iter_0000042/ or DIR/release/       a checkpoint of `megatron.core.dist_checkpointing`:
        metadata.json                       its format, `torch_dist`
        .metadata                           the index of its tensors
        *.distcp                            tensors
        common.pt                           what is no tensor
"""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.errors import CheckpointError, first_few

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT, INDEX, FORMAT_FILE = "torch_dist", ".metadata", "metadata.json"
RELEASE = "release"
"""A checkpoint of no iteration: a model that was made, not trained."""


def is_megatrons(folder: Path) -> bool:
    """Whether a folder is of Megatron's checkpoints, or one of them."""
    return any((folder / name).is_file() for name in (TRACKER, INDEX)) or _older(folder)


def open_folder(folder: Path) -> Path:
    """The distributed checkpoint that ``folder`` is, or the newest in it.
    Raises CheckpointError: there is none that can be read."""
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {folder}")
    found = folder
    if (folder / TRACKER).is_file():
        newest = (folder / TRACKER).read_text(errors="replace").strip()
        found = folder / (f"iter_{int(newest):07d}" if newest.isdecimal() else newest or RELEASE)
        if not found.is_dir():
            others = sorted(path.name for path in folder.iterdir() if path.is_dir())
            there = f"there are {first_few(others)}: give one of them" if others else "there is no other"
            raise CheckpointError(f"{folder / TRACKER} names {newest!r}, and there is no folder {found.name}; {there}")
    if _older(found):
        raise CheckpointError(
            f"{found} is in Megatron's older format (mp_rank_*): only distributed checkpoints ({FORMAT}) can be read. "
            f"Megatron-LM converts it: --ckpt-convert-format {FORMAT} --ckpt-convert-save DIR"
        )
    if not (found / INDEX).is_file() or not (found / FORMAT_FILE).is_file():
        missing = first_few(name for name in (FORMAT_FILE, INDEX) if not (found / name).is_file())
        raise CheckpointError(
            f"{found} is no distributed checkpoint of Megatron's, or one that was not finished: it has no {missing}"
        )
    try:
        kind = json.loads((found / FORMAT_FILE).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{found / FORMAT_FILE} cannot be read: {error!r}") from None
    if kind != FORMAT:
        raise CheckpointError(f"{found} is in the format {kind!r}; only {FORMAT} can be read")
    return found


def advice(folder: str, model: str | None) -> str:
    """What to do with a folder of Megatron's where a model in Hugging Face form is expected."""
    folder = folder.rstrip("/")
    return (
        f"{folder} is a checkpoint of Megatron's, not a model in Hugging Face form. Make one of it and give that: "
        f"agentrl convert --load {folder} --hf-checkpoint {model or 'MODEL'} --output-dir {folder}-hf"
    )


def _older(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*"))
