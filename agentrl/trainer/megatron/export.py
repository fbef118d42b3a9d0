"""Weights out: full Hugging Face tensors, one after the other, on every rank in lockstep, and a directory of them.

Ranks exchange the list of tensors once, and then only tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from agentrl.data.files import atomic_folder
from agentrl.data.tensor_file import save_tensors
from agentrl.data.writes import Writes
from agentrl.trainer.megatron.conversion import INDEX, Conversion, expert_group, is_split
from agentrl.trainer.megatron.model import PolicyModel

T = TypeVar("T")
SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py", ".h5", ".msgpack")
_OWN = ("config.json", INDEX)


@dataclass(frozen=True)
class _Item:
    """One parameter of one pipeline stage, as all ranks need to know it."""

    stage: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: bool
    dim: int
    expert_rank: int | None
    """Who has it, where experts are spread over ranks and it belongs to one."""


class Exporter:
    """Iterates over ``(hf_name, tensor)`` of a model, again and again.

    Tensors have the trainer's dtype and device and may be views of live weights: use them before the
    next one is asked for or the model is trained. Every rank of the world must iterate at the
    same time and to the same point, for each tensor costs collectives.
    """

    def __init__(self, chunks: Iterable[PolicyModel], conversion: Conversion):
        self._conversion, layout = conversion, conversion.layout
        self._held = conversion.tensors(*chunks)
        mine = [
            _Item(
                stage=layout.pp_rank,
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                split=is_split(tensor) and layout.tp > 1 and not conversion.spread(name),
                dim=getattr(tensor, "partition_dim", -1),
                expert_rank=layout.ep_rank if conversion.spread(name) else None,
            )
            for name, tensor in self._held.items()
            # The last stage's copy of a tied embedding is the first stage's embedding.
            if not (conversion.tied and name == "output_layer.weight")
        ]
        if layout.ep > 1:
            mine = _together(mine, layout.ep, expert_group())
        if layout.pp > 1:
            mine = _together(mine, layout.pp, parallel_state.get_pipeline_model_parallel_group())
        self._items = mine

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._items:
            with torch.no_grad():
                pairs = self._conversion.to_hf(item.name, self._whole(item))
            yield from pairs

    def _whole(self, item: _Item) -> Tensor:
        layout = self._conversion.layout
        there = self._held.get(item.name) if item.stage == layout.pp_rank else None
        device = next(iter(self._held.values())).device
        tensor = torch.empty(item.shape, dtype=item.dtype, device=device) if there is None else there.detach()
        if layout.pp > 1 and item.expert_rank in (None, layout.ep_rank):
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(tensor, src=dist.get_global_rank(group, item.stage), group=group)
        if item.expert_rank is not None:
            group = expert_group()
            dist.broadcast(tensor, src=dist.get_global_rank(group, item.expert_rank), group=group)
        if not item.split:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(layout.tp)]
        dist.all_gather(parts, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return self._conversion.merge(item.name, parts, item.dim)


def _together(mine: list[_Item], size: int, group: dist.ProcessGroup) -> list[_Item]:
    """The items of all ranks of a group, each once."""
    lists: list[list[_Item]] = [[] for _ in range(size)]
    dist.all_gather_object(lists, mine, group=group)
    return list(dict.fromkeys(item for items in lists for item in items))


def save_hf(
    weights: Iterable[tuple[str, Tensor]],
    more: Iterable[tuple[str, Tensor]] | None,
    source: Path,
    target: Path,
    writes: Writes,
) -> None:
    """Write a directory that ``from_pretrained`` and SGLang load.

    Everything but the weights (tokenizer, chat template, generation config) is copied from ``source``;
    ``config.json`` gets the dtype that is saved. The directory appears under its name when complete.

    Args:
        weights: ``(hf_name, tensor)``; consumed to the end whether or not this rank writes.
        more: tensors besides, that no training changes; None on ranks that only take part in the export.
        source: the checkpoint directory the model came from.
        target: directory to make; replaced where it exists.
        writes: where it is written at once, there is never more than a shard of it in this machine's memory.
    """
    if more is None:
        for _ in weights:
            pass
        return
    # Copies: an exported tensor may be a view of weights that will be trained on.
    copies = ((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in weights)
    taken = iter(list(copies)) if writes.later else copies
    writes(partial(_write_folder, chain(taken, more), source), target)


def _write_folder(weights: Iterable[tuple[str, Tensor]], source: Path, target: Path) -> None:
    with atomic_folder(target) as building:
        dtype = _write_shards(weights, building)
        _copy_rest(source, building, dtype)


def _write_shards(weights: Iterable[tuple[str, Tensor]], folder: Path) -> torch.dtype:
    shards: list[list[str]] = []
    total, dtype = 0, torch.float32
    for shard in in_parts(weights, lambda pair: pair[1].nbytes, SHARD_BYTES):
        if not shards:  # the first is a weight; biases of routers are float32 in every checkpoint
            dtype = shard[0][1].dtype
        save_tensors(dict(shard), folder / f"shard-{len(shards):05d}")
        shards.append([name for name, _ in shard])
        total += sum(tensor.nbytes for _, tensor in shard)
        del shard  # before the next one is gathered
    index: dict[str, str] = {}
    for n, names in enumerate(shards):
        file = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        (folder / f"shard-{n:05d}").rename(folder / file)
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))
    return dtype


def in_parts(items: Iterable[T], size_of: Callable[[T], int], size: int) -> Iterator[list[T]]:
    """The items in their order, in lists that are as large as ``size`` or just beyond it."""
    part: list[T] = []
    filled = 0
    for item in items:
        part.append(item)
        filled += size_of(item)
        if filled >= size:
            yield part
            part, filled = [], 0
    if part:
        yield part


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
