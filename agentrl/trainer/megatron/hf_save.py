"""A Hugging Face model directory from live weights: config, safetensors, tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from agentrl.data.files import atomic_folder
from agentrl.trainer.megatron.tensor_file import save_tensors

SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py", ".h5", ".msgpack")
_OWN = ("config.json", "model.safetensors.index.json")


def save_hf(weights: Iterable[tuple[str, Tensor]], source: Path, target: Path, *, write: bool) -> None:
    """Write a directory that ``from_pretrained`` and SGLang load.

    Everything but the weights (tokenizer, chat template, generation config) is copied from ``source``;
    ``config.json`` gets the dtype that is saved. The directory appears under its name when complete.

    Args:
        weights: ``(hf_name, tensor)``; consumed to the end whether or not this rank writes.
        source: the checkpoint directory the model came from.
        target: directory to make; replaced where it exists.
        write: False on ranks that only take part in the export.
    """
    if not write:
        for _ in weights:
            pass
        return
    with atomic_folder(target) as building:
        dtype = _write_shards(weights, building)
        _copy_rest(source, building, dtype)


def _write_shards(weights: Iterable[tuple[str, Tensor]], folder: Path) -> torch.dtype:
    shard: dict[str, Tensor] = {}
    names: list[list[str]] = []
    size = total = 0
    dtype = torch.float32

    def flush() -> None:
        nonlocal shard, size
        if shard:
            save_tensors(shard, folder / f"shard-{len(names):05d}")
            names.append(list(shard))
            shard, size = {}, 0

    for name, tensor in weights:
        # A copy: an exported tensor may be a view of weights that will be trained on.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        dtype = tensor.dtype
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= SHARD_BYTES:
            flush()
    flush()
    if len(names) == 1:
        (folder / "shard-00000").rename(folder / "model.safetensors")
        return dtype
    index = {}
    for n, contained in enumerate(names):
        file = f"model-{n + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"shard-{n:05d}").rename(folder / file)
        index |= dict.fromkeys(contained, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    )
    return dtype


def _copy_rest(source: Path, folder: Path, dtype: torch.dtype) -> None:
    for file in source.iterdir():
        if file.is_dir() and file.name == "additional_chat_templates":
            shutil.copytree(file, folder / file.name)
        elif file.is_file() and file.suffix not in _NOT_COPIED and file.name not in _OWN:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
