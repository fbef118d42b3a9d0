"""Weights between a Hugging Face checkpoint and Megatron's model, by the names and layouts of `agentrl/families`.

A parameter of Megatron's is known by its name with the numbers of layer and expert in the whole model, whichever rank
holds it: ``decoder.layers.3.mlp.experts.17.linear_fc1.weight``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from agentrl.errors import CheckpointError, ConfigError, first_few
from agentrl.families.family import Family, Source
from agentrl.trainer.megatron.parallel import Layout

INDEX = "model.safetensors.index.json"
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d)\.weight|(linear_fc\d)\.weight(\d+))")
_OF_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


@dataclass(frozen=True)
class Conversion:
    """One architecture on one parallel layout.

    Attributes:
        hf_config: of the checkpoint.
        config: Megatron's, made of it.
        logits: whether the model has an output layer; otherwise it ends with hidden states.
    """

    hf_config: PretrainedConfig
    family: Family
    config: TransformerConfig
    layout: Layout
    logits: bool = True

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.logits and bool(getattr(self.hf_config, "tie_word_embeddings", False))

    @property
    def vocab_size(self) -> int:
        return self.hf_config.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary with the rows that make it divisible by the tensor-parallel size."""
        return -(-self.vocab_size // self.layout.tp) * self.layout.tp

    # -- names ------------------------------------------------------------------------------------

    def tensors(self, *chunks: GPTModel) -> dict[str, Tensor]:
        """What this rank holds of the model, by name: parameters, and the biases of routers, which are none."""
        whole: dict[str, Tensor] = {}
        for chunk in chunks:
            held: dict[str, Tensor] = dict(chunk.named_parameters())
            held |= {name: value for name, value in chunk.named_buffers() if name.endswith(".expert_bias")}
            whole |= {self.name(chunk, local): tensor for local, tensor in held.items()}
        return whole

    def name(self, chunk: GPTModel, local: str) -> str:
        """The name of a parameter in the whole model."""
        head, _, rest = local.partition("decoder.layers.")
        if head or not rest:
            return local
        number, _, rest = rest.partition(".")
        if found := _EXPERT.fullmatch(rest):
            first = self.layout.ep_rank * ((self.config.num_moe_experts or 0) // self.layout.ep)
            expert, part = (found[1], found[2]) if found[1] else (found[4], found[3])
            rest = f"mlp.experts.{first + int(expert)}.{part}.weight"
        return f"decoder.layers.{chunk.decoder.layers[int(number)].layer_number - 1}.{rest}"

    def source(self, name: str) -> Source:
        """Raises ConfigError where the family has no such parameter."""
        if name == "output_layer.weight" and self.tied:
            name = "embedding.word_embeddings.weight"
        try:
            return self.family.source(name)
        except KeyError:
            raise ConfigError(f"{self.hf_config.model_type} has no tensor for Megatron's {name}") from None

    def spread(self, name: str) -> bool:
        """Whether a parameter belongs to an expert, and experts are spread over ranks."""
        return self.layout.ep > 1 and _OF_EXPERT.search(name) is not None

    # -- tensors ----------------------------------------------------------------------------------

    def from_hf(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """The whole parameter, of the tensors that its source names."""
        source = self.source(name)
        if source.layout == "qkv":
            groups = self.config.num_query_groups
            return torch.cat([t.unflatten(0, (groups, -1)) for t in tensors], 1).flatten(0, 1)
        whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        return self.padded(whole) if source.layout == "vocabulary" else whole

    def to_hf(self, name: str, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Names and tensors of a whole parameter; views of it where that is possible."""
        source = self.source(name)
        parts: Sequence[Tensor]
        if source.layout == "qkv":
            grouped = whole.unflatten(0, (self.config.num_query_groups, -1))
            width, config = self.config.kv_channels or 0, self.config
            queries = config.num_attention_heads // (config.num_query_groups or 1) * width
            parts = [part.flatten(0, 1) for part in grouped.split([queries, width, width], 1)]
        elif source.layout == "vocabulary":
            parts = [whole[: self.vocab_size]]
        else:
            parts = whole.chunk(len(source.names))
        return list(zip(source.names, parts, strict=True))

    def padded(self, whole: Tensor) -> Tensor:
        """Embedding or output layer with this layout's number of rows."""
        whole = whole[: self.vocab_size]
        missing = self.padded_vocab_size - len(whole)
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole

    def split(self, name: str, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole parameter, laid out as its ``like``."""
        if not is_split(like) or self.spread(name):
            return whole
        if self.source(name).layout == "gate_up":
            halves = [half.chunk(self.layout.tp)[self.layout.tp_rank] for half in whole.chunk(2)]
            return torch.cat(halves)
        return whole.chunk(self.layout.tp, vars(like)["partition_dim"])[self.layout.tp_rank]

    def merge(self, name: str, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole parameter of the parts of all tensor-parallel ranks, split along ``dim``."""
        if len(parts) == 1:
            return parts[0]
        if self.source(name).layout == "gate_up":
            return torch.cat([torch.cat(half) for half in zip(*(p.chunk(2) for p in parts), strict=True)])
        return torch.cat(list(parts), dim)

    # -- a checkpoint -----------------------------------------------------------------------------

    def load(self, chunks: Iterable[GPTModel], folder: Path) -> None:
        """Set the weights of this rank's part. Collective.
        Raises ConfigError: the checkpoint has a tensor that no part of the model takes.
        Raises CheckpointError: it lacks one that the model needs."""
        held = self.tensors(*chunks)
        with torch.no_grad():
            for name, part in self.read(held, folder):
                held[name].copy_(part)

    def read(self, held: Mapping[str, Tensor], folder: Path) -> Iterator[tuple[str, Tensor]]:
        """Name and value, in the file's dtype, of each of the parameters that this rank holds. Collective.
        Raises ConfigError, CheckpointError: as :meth:`load`."""
        files = tensor_files(folder)
        self._account(held, files.keys(), folder)
        opened: dict[Path, Any] = {}
        for name, tensor in held.items():
            found = []
            for hf_name in self.source(name).names:
                file = files[hf_name]
                if file not in opened:
                    opened[file] = safe_open(file, framework="pt", device="cpu")
                found.append(opened[file].get_tensor(hf_name))
            part = self.split(name, self.from_hf(name, found), tensor)
            if part.shape != tensor.shape:
                raise CheckpointError(
                    f"{folder}: {', '.join(self.source(name).names)} give {list(part.shape)} for {name}, "
                    f"the model that config.json describes has {list(tensor.shape)}"
                )
            yield name, part

    def _account(self, held: Iterable[str], there: Iterable[str], folder: Path) -> None:
        mine = {hf for name in held for hf in self.source(name).names}
        wanted: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(wanted, mine)
        needed, there = set().union(*wanted), set(there)
        missing = sorted(needed - there)
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of the {len(needed)} tensors of the model that its config.json "
                f"describes: {first_few(missing)}"
            )
        unused = sorted(name for name in there - needed if not self.left_out(name))
        if unused:
            raise ConfigError(
                f"{len(unused)} of the {len(there)} tensors in {folder} are no part of the model that the trainer "
                f"builds: {first_few(unused)}. The engine would use them, the trainer would not: such a checkpoint "
                "cannot be trained."
            )

    def left_out(self, hf_name: str) -> bool:
        """Whether a tensor of a file is none of the model that acts.

        Old files keep rotary frequencies; a tied head is the embedding, whatever the file has for it; the layers behind
        the last predict further tokens, for speculative decoding. A model without logits takes no head.
        """
        return (
            hf_name.endswith("rotary_emb.inv_freq")
            or (self.tied and hf_name == "lm_head.weight")
            or (not self.logits and hf_name in ("lm_head.weight", "score.weight"))
            or self.predicts_further(hf_name)
        )

    def predicts_further(self, hf_name: str) -> bool:
        """Whether a tensor belongs to the layers that predict further tokens (``num_nextn_predict_layers``)."""
        further = getattr(self.hf_config, "num_nextn_predict_layers", None) or 0
        last = self.hf_config.num_hidden_layers
        return any(hf_name.startswith(f"model.layers.{n}.") for n in range(last, last + further))

    def kept_aside(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        """Tensors of a checkpoint that are not trained and belong to it: layers that predict further tokens."""
        for name, file in tensor_files(folder).items():
            if self.predicts_further(name):
                with safe_open(file, framework="pt", device="cpu") as opened:
                    yield name, opened.get_tensor(name)


def is_split(parameter: Tensor) -> bool:
    """Whether tensor parallelism splits it."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def expert_group() -> dist.ProcessGroup:
    """The ranks over which experts are spread."""
    return parallel_state.get_expert_model_parallel_group()


def tensor_files(folder: Path) -> dict[str, Path]:
    """Name of each tensor of a checkpoint -> the file that has it.
    Raises CheckpointError: there is no safetensors file, or one that the index names is missing."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        files = {name: folder / file for name, file in index.items()}
        if gone := sorted({str(file) for file in files.values() if not file.is_file()}):
            raise CheckpointError(f"{folder}/{INDEX} names files that are not there: {first_few(gone)}")
        return files
    files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors")
    return files
