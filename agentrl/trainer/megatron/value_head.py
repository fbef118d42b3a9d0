"""What a critic has in place of the output layer: one number a state."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor

NAME = "score.weight"
"""Its tensor in a Hugging Face checkpoint, as in transformers' models for sequence classification."""


class ValueHead(torch.nn.Module):
    """A linear map from a hidden state to its value, whole on each tensor-parallel rank. It starts at 0."""

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
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                if NAME in file.keys() and (weight := file.get_tensor(NAME)).shape == head.weight.shape:  # noqa: SIM118
                    with torch.no_grad():
                        head.weight.copy_(weight)
        return head

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """float32[N]: values at token positions ``rows`` of hidden states [T, 1, h], or [T / TP, 1, h] with sequence
        parallelism. All tensor-parallel ranks compute the same, so no gradient is to be summed over them."""
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        states = hidden.squeeze(1).index_select(0, rows)
        return (states.float() @ self.weight.float().t()).squeeze(1)
