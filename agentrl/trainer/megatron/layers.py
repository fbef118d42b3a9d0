"""The layer specification: Megatron's local modules with packed attention, or TransformerEngine's.

Without TransformerEngine, Megatron's local spec refuses sequence parallelism (its norm) and packed
sequences (its attention). :class:`Norm` and
:class:`~agentrl.trainer.megatron.attention.VarlenAttention` fill both gaps; everything else is
Megatron's.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor

from agentrl.trainer.megatron.attention import VarlenAttention
from agentrl.trainer.megatron.conversion import tensor_files

VALUE = "score.weight"
"""A value head's tensor in a Hugging Face checkpoint, as in transformers' models for sequence classification."""


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is there and there is a GPU to run it on."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


class Norm:
    """RMSNorm or LayerNorm of torch whose parameters say that they see only part of the sequence.

    With sequence parallelism each tensor-parallel rank normalizes its slice of the tokens, so
    gradients of the weights must be summed over those ranks; Megatron does so for
    parameters marked ``sequence_parallel``.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused):
        kind = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class NormedOutput:
    """Mixed into a projection: what it gives is normalized before it is added to the residual."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any):
        super().__init__(*args, config=config, **kwargs)  # type: ignore[call-arg]  # of the projection
        norm: Any = Norm  # makes torch's modules, not its own
        self.output_norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any):
        out, bias = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.output_norm(out), bias


def block_spec(config: TransformerConfig, *, output_norms: bool = False, vp_stage: int | None = None):
    """Specification of this pipeline stage's layers.

    TransformerEngine's modules where it is installed on a GPU (fused norms and linears, packed
    attention by its kernels), else Megatron's local modules with :class:`Norm` and packed attention.
    """
    engine = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    if not engine:
        replacements = {DotProductAttention: VarlenAttention, WrappedTorchNorm: Norm}
        for layer in spec.layer_specs:
            _replace(layer, replacements)
        spec.layer_norm = Norm
    if output_norms:
        for holder, name in (("self_attention", "linear_proj"), ("mlp", "linear_fc2")):
            parts = {id(p): p for p in (getattr(layer.submodules, holder).submodules for layer in spec.layer_specs)}
            for part in parts.values():  # layers share a specification
                linear = getattr(part, name)
                setattr(part, name, type(f"Normed{linear.__name__}", (NormedOutput, linear), {}))
    return spec


def _replace(node: object, replacements: dict[type, type]) -> None:
    """Swap module classes everywhere below a specification."""
    if isinstance(node, ModuleSpec):
        for holder in (node.submodules, node.params):
            _replace(holder, replacements)
        if node.module in replacements:
            node.module = replacements[node.module]
        return
    attributes: dict[str, object] = node if isinstance(node, dict) else getattr(node, "__dict__", None) or {}
    for name, value in list(attributes.items()):
        if isinstance(value, type) and value in replacements:
            attributes[name] = replacements[value]
        elif isinstance(value, ModuleSpec):
            _replace(value, replacements)


class ValueHead(torch.nn.Module):
    """What a critic has in place of the output layer: a linear map from a hidden state to its value, whole on each
    tensor-parallel rank. It starts at 0."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)
        self._sequence_parallel = config.sequence_parallel

    @classmethod
    def read(cls, config: TransformerConfig, folder: Path) -> ValueHead:
        """With the weights that a checkpoint has, if it has some for one number."""
        head = cls(config)
        if (path := tensor_files(folder).get(VALUE)) is not None:
            with safe_open(path, framework="pt", device="cpu") as file, torch.no_grad():
                if (weight := file.get_tensor(VALUE)).shape == head.weight.shape:
                    head.weight.copy_(weight)
        return head

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """float32[N]: values at token positions ``rows`` of hidden states [T, 1, h], or [T / TP, 1, h] with sequence
        parallelism. All tensor-parallel ranks compute the same, so no gradient is to be summed over them."""
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        states = hidden.squeeze(1).index_select(0, rows)
        return (states.float() @ self.weight.float().t()).squeeze(1)
