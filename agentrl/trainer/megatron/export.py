"""Weights out: full Hugging Face tensors, one after the other, on every rank in lockstep, and a directory of them.

The naming and the layout are mbridge's. The walk is ours: mbridge exchanges Python objects for every
tensor, we exchange the list of tensors once and then only tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from mbridge.core.bridge import Bridge
from torch import Tensor

from agentrl.data.files import atomic_folder
from agentrl.data.tensor_file import save_tensors
from agentrl.trainer.megatron.model import PolicyModel

SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py", ".h5", ".msgpack")
_OWN = ("config.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class _Item:
    """One parameter of one pipeline stage, as all ranks need to know it."""

    stage: int
    local_name: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: bool
    dim: int


class Exporter:
    """Iterates over ``(hf_name, tensor)`` of a model, again and again.

    Tensors have the trainer's dtype and device and may be views of live weights: use them before the
    next one is asked for or the model is trained. Every rank of the world must iterate at the
    same time and to the same point, for each tensor costs collectives.
    """

    def __init__(self, model: PolicyModel, bridge: Bridge):
        self._model, self._bridge = model, bridge
        self._parameters = dict(model.named_parameters())
        names = bridge._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        mpu = bridge.mpu
        tied = bool(getattr(bridge.hf_config, "tie_word_embeddings", False))
        mine = [
            _Item(
                stage=mpu.pp_rank,
                local_name=local,
                name=names[local],
                shape=tuple(p.shape),
                dtype=p.dtype,
                split=bool(getattr(p, "tensor_model_parallel", False)) and mpu.tp_size > 1,
                dim=getattr(p, "partition_dim", -1),
            )
            for local, p in self._parameters.items()
            # The last stage's copy of a tied embedding is the first stage's embedding.
            if not (tied and names[local] == "output_layer.weight")
        ]
        stages: list[list[_Item]] = [mine]
        if mpu.pp_size > 1:
            stages = [[] for _ in range(mpu.pp_size)]
            dist.all_gather_object(stages, mine, group=mpu.pp_group)
        self._items = [item for stage in stages for item in stage]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._items:
            with torch.no_grad():
                whole = self._whole(item)
                pairs = list(zip(*self._bridge._weight_to_hf_format(item.name, whole), strict=True))
            yield from pairs

    def _whole(self, item: _Item) -> Tensor:
        mpu = self._bridge.mpu
        if item.stage == mpu.pp_rank:
            tensor = self._parameters[item.local_name].detach()
        else:
            tensor = torch.empty(item.shape, dtype=item.dtype, device=next(self._model.parameters()).device)
        if mpu.pp_size > 1:
            source = dist.get_global_rank(mpu.pp_group, item.stage)
            dist.broadcast(tensor, src=source, group=mpu.pp_group)
        if not item.split:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(mpu.tp_size)]
        dist.all_gather(parts, tensor.contiguous(), group=mpu.tp_group)
        like = torch.empty(0)
        vars(like).update(tensor_model_parallel=True, partition_dim=item.dim)
        return self._bridge._weight_merge_across_tp(item.name, parts, like)


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
    index: dict[str, str] = {}
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
