"""Attention over packed sequences in plain PyTorch, for the CPU and for GPUs without TransformerEngine.

Megatron's own local attention takes no packed sequences and holds the scores of all pairs in memory.
This one cuts the packed [T] tokens into their sequences, runs torch's fused causal attention on
each run of equally long ones, and never lets a token see another sequence. On GPUs, in half precision, torch's own
kernel for packed sequences takes all in one call.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class PackedSequences(PackedSeqParams):
    """Packing of one micro-batch: ``lengths`` of its sequences, ``positions`` int64[T] of its tokens.

    With TransformerEngine ``qkv_format`` is ``"thd"`` and its kernels read ``cu_seqlens``. Without,
    it stays ``"sbhd"``: Megatron then applies rotary embeddings position by position in one go, and
    :class:`VarlenAttention` reads ``lengths``.
    """

    lengths: tuple[int, ...] = ()
    positions: Tensor = field(kw_only=True)


def pack(lengths: tuple[int, ...], positions: Tensor, *, thd: bool) -> PackedSequences:
    """The packing of sequences of these lengths; ``positions`` restart at 0 in each."""
    longest, starts = max(lengths), _starts(lengths, positions.device) if thd else None
    return PackedSequences(
        qkv_format="thd" if thd else "sbhd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
        positions=positions,
    )


class VarlenAttention(MegatronModule):
    """Megatron's ``core_attention`` for packed sequences: causal, grouped queries, no dropout."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_unused):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Args: query [T, 1, heads, dim]; key and value [T, 1, groups, dim]; latent attention leaves the 1 out.

        Returns [T, 1, heads * dim of values].
        """
        lengths = (query.shape[0],) if packed_seq_params is None else packed_seq_params.lengths
        query, key, value = (x.flatten(1, -2) for x in (query, key, value))
        if self.config.multi_latent_attention:
            # The rotated part of a key is one for all heads. Megatron's local projection splits its gradient between
            # tensor-parallel ranks without adding up what the heads of the others have to say. Here the ranks' sums are
            # added; a sum is contiguous, and of what is not, Megatron's reduction adds up a copy and throws it away.
            own, shared = key.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], -1)
            shared = copy_to_tensor_model_parallel_region(shared[:, :1].contiguous())
            key = torch.cat([own, shared.expand(-1, own.shape[1], -1)], -1)
        out = varlen_attention(query, key, value, lengths, self.softmax_scale)
        return out.reshape(out.shape[0], 1, -1)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float | None = None
) -> Tensor:
    """Causal attention within each of the packed sequences.

    Args:
        query: [T, heads, dim].
        key, value: [T, groups, dim], ``heads`` a multiple of ``groups``; values may be narrower.
        lengths: of the sequences, with sum T. Neighbours of equal length run as one batch.
        scale: of the scores; default 1 / sqrt(dim).

    Returns:
        [T, heads, dim of values].
    """
    width = value.shape[-1]
    if width != query.shape[-1]:  # torch's fused attention takes one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    if takes_flash(query):
        return flash_attention(query, key, value, lengths, scale)[..., :width]
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups:
        key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    runs = [(n, sum(1 for _ in same)) for n, same in itertools.groupby(lengths)]
    sizes = [n * count for n, count in runs]
    outs = []
    for (n, count), q, k, v in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (x.unflatten(0, (count, n)).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[..., :width]


def takes_flash(query: Tensor) -> bool:
    """Whether torch's kernel for packed sequences computes these queries: all in one call, keys and values as they are.

    It wants half precision, widths that are multiples of 8 up to 256, compute capability 8.0, and a torch whose kernel
    knows groups of queries.
    """
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if query.shape[-1] > 256 or query.shape[-1] % 8 or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return _knows_groups()


@functools.cache
def _knows_groups() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"enable_gqa", "window_size", "scale"} <= set(inspect.signature(varlen_attn).parameters)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float | None = None
) -> Tensor:
    """:func:`varlen_attention` by torch's FlashAttention, values as wide as keys. Written against torch 2.13; not yet
    run on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = _starts(lengths, query.device), max(lengths)
    grouped, causal = query.shape[1] != key.shape[1], (-1, 0)
    out = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=causal, enable_gqa=grouped
    )
    assert isinstance(out, Tensor)  # without auxiliary outputs
    return out


@functools.lru_cache(maxsize=8)
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each sequence starts, and the end: int32[len(lengths) + 1]. The same for all layers of a micro-batch."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


class Rotary(torch.nn.Module):
    """Angles of queries and keys, with the frequencies that transformers computes.

    Megatron asks an embedding how long its table is to be and then for the table. Without TransformerEngine the answer
    is the positions themselves, each token's in its own sequence.

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
