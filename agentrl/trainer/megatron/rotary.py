"""Rotary embeddings of packed sequences, with the frequencies that transformers computes.

Megatron asks an embedding how long its table is to be and then for the table. Where sequences are packed without
TransformerEngine the answer is the positions themselves, each token's in its own sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentrl.trainer.megatron.attention import PackedSequences


class Rotary(torch.nn.Module):
    """Angles of queries and keys.

    Args:
        frequencies: float32[dim / 2] of pairs of neighbours, or of a feature and the one half a head further.
        interleaved: whether neighbours are rotated together.
    """

    def __init__(self, frequencies: Tensor, *, interleaved: bool = False):
        super().__init__()
        self._frequencies, self._interleaved = frequencies, interleaved

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Any, config: Any, packed_seq_params: PackedSequences
    ) -> Tensor:
        """Positions int64[T] of the packed tokens; with TransformerEngine all up to the longest sequence's."""
        packed = packed_seq_params
        if packed.qkv_format == "thd":
            return torch.arange(packed.max_seqlen_q, device=packed.positions.device)
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """float32[T, 1, 1, dim]."""
        angles = torch.outer(positions.float(), self._frequencies)
        table = angles.repeat_interleave(2, 1) if self._interleaved else torch.cat((angles, angles), 1)
        return table[:, None, None]


class LatentRotary(Rotary):
    """The same for Megatron's latent attention, whose queries are [T, heads, dim].

    Args:
        frequencies: float32[dim / 2].
        scale: factor of cosine and sine; given with YaRN, for which Megatron takes a pair.
    """

    def __init__(self, frequencies: Tensor, scale: float | None):
        super().__init__(frequencies)
        self._scale = scale

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """float32[T, 1, dim], or float32[T, 1, 1, dim] with TransformerEngine; and the scale if there is one."""
        table = super().forward(positions)
        table = table if packed_seq else table.squeeze(1)
        return table if self._scale is None else (table, self._scale)
