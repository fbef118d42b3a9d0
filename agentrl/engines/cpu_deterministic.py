"""SGLang's deterministic mode (``--enable-deterministic-inference``) on the CPU.

What the mode promises: the tokens and log-probabilities of a request follow from its prompt, its ``sampling_seed``
and the weights alone, to the last bit. They do not depend on what else is in the batch, on how a prompt is cut into
chunks, or on what is in the prefix cache. SGLang keeps that promise with kernels for GPUs and refuses the CPU's
attention. :func:`install` lets it in and replaces what depends on the batch there:

=====================================  ==============================================================================
depends on the batch                   replaced by
=====================================  ==============================================================================
matrix products: BLAS chooses its      products of exactly :data:`TILE` rows, the last ones padded
kernel by the number of rows
attention: the order of its sums       one query token at a time, keys padded to whole blocks of the CPU's
follows the lengths                    flash attention (:class:`InvariantAttention`)
the sampler: one generator for all     a number from the request's seed and the token's position (:func:`draw`)
=====================================  ==============================================================================

Norms, activations and softmax run row by row; that holds with one thread, which an engine in this mode has. That
products and attention are invariant on the machine at hand is tried once for each shape before it is used, with an
error if not. float32 only: bf16 takes other paths, chosen by the batch.

One limit is SGLang's own, on GPUs too: where one request of a batch has top-k or top-p, all of the batch draw over
sorted probabilities. The requests of a run all have the same.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TILE = 32
"""Rows of each matrix product."""
KEY_BLOCK = 512
"""Keys that torch's flash attention on the CPU sums at once; whole blocks of masked keys change no bit."""
QUERY_CHUNK = 256
"""Query tokens of a prompt in one call, which bounds the memory of their mask. No result depends on it."""

_library: torch.library.Library | None = None


def install() -> None:
    """Let SGLang serve deterministically on the CPU. Call it before its arguments are parsed."""
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    attention = type("InvariantAttention", (InvariantAttention, TorchNativeAttnBackend), {})
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    attention_registry.ATTENTION_BACKENDS["torch_native"] = attention
    batch_invariant_ops.enable_batch_invariant_mode = use_tiled_products
    sampler.sampling_from_probs_torch = sample_probabilities
    sampler.multinomial_with_seed = sample_log_probabilities


# Matrix products.


def use_tiled_products() -> None:
    """Have every ``aten::mm`` and ``aten::addmm`` of this process go through :func:`tiled_mm`."""
    global _library
    if _library is not None:
        return
    torch.set_num_threads(1)
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("mm", tiled_mm, "CPU", allow_override=True)
    _library.impl("addmm", _tiled_addmm, "CPU", allow_override=True)


def tiled_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``; a row of the result depends on that row of ``a`` alone. ``[M, K], [K, N] -> [M, N]``."""
    rows, (depth, width) = a.shape[0], b.shape
    _check_shape(_product_is_invariant, depth, width, b.dtype)
    whole = -(-rows // TILE) * TILE
    if whole != rows:
        a = torch.cat([a, a.new_zeros(whole - rows, depth)])
    a, out = a.contiguous(), a.new_empty(whole, width)
    for start in range(0, whole, TILE):
        torch.mm(a[start : start + TILE], b, out=out[start : start + TILE])
    return out[:rows]


def _tiled_addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * tiled_mm(a, b) + beta * bias


def _product_is_invariant(depth: int, width: int, dtype: torch.dtype) -> bool:
    """Whether all rows of a tile are computed alike here, whatever stands in the others."""
    if not dtype.is_floating_point:
        return True
    generator = torch.Generator().manual_seed(0)
    # As a linear layer has it: the transpose of what is stored.
    weight = torch.randn(width, depth, dtype=dtype, generator=generator).t()
    rows = torch.randn(TILE, depth, dtype=dtype, generator=generator)
    mixed = torch.empty(TILE, width, dtype=dtype)
    torch.mm(rows, weight, out=mixed)
    for place in (0, TILE // 2 - 1, TILE - 1):
        alike = torch.empty(TILE, width, dtype=dtype)
        torch.mm(rows[place].expand(TILE, depth).contiguous(), weight, out=alike)
        if not torch.equal(alike, mixed[place].expand(TILE, width)):
            return False
    return True


# Attention.


class InvariantAttention:
    """Attention of which each query token is computed alike, in a prompt and alone. Mixed into SGLang's own for torch.

    A token's queries are the rows of one call of flash attention, the heads that share a key head together. The
    tokens of a call, and the sequences, are its batch, whose entries it computes one by one.
    """

    _plan: list[tuple[Tensor, Tensor, Tensor]] | None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Forget the last batch."""
        super().init_forward_metadata(forward_batch)
        self._plan = None

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None = None, scaling: float | None = None,
        sliding_window_size: int | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        _refuse_other_attention(encoder_lens, sliding_window_size)
        if self._plan is None:
            self._plan = plan_decode(req_to_token, req_pool_indices, seq_lens)
            _check_attention(query, k_cache, v_cache)
        return attend(query, output, k_cache, v_cache, self._plan, scaling)

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None, scaling: float | None = None, causal: bool = False,
        sliding_window_size: int | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        _refuse_other_attention(encoder_lens, sliding_window_size, causal)
        if self._plan is None:
            self._plan = plan_extend(req_to_token, req_pool_indices, seq_lens, extend_seq_lens)
            _check_attention(query, k_cache, v_cache)
        return attend(query, output, k_cache, v_cache, self._plan, scaling)


def plan_decode(req_to_token: Tensor, requests: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One token a sequence: a part for all sequences of as many blocks of keys. See :func:`attend`."""
    blocks = (lengths - 1) // KEY_BLOCK + 1
    plan = []
    for count in blocks.unique().tolist():
        rows = (blocks == count).nonzero().view(-1)
        last = lengths[rows] - 1
        slots = _slots(req_to_token, requests[rows], lengths[rows, None], count * KEY_BLOCK)
        plan.append((rows, slots, _mask(last, count * KEY_BLOCK)))
    return plan


def plan_extend(
    req_to_token: Tensor, requests: Tensor, lengths: Tensor, new: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The last ``new[i]`` tokens of each sequence: a part for each, or several for many. See :func:`attend`."""
    plan, start = [], 0
    for request, length, count in zip(requests, lengths.tolist(), new.tolist(), strict=True):
        for first in range(0, count, QUERY_CHUNK):
            size = min(QUERY_CHUNK, count - first)
            positions = torch.arange(size) + (length - count + first)
            padded = -(-(int(positions[-1]) + 1) // KEY_BLOCK) * KEY_BLOCK
            slots = _slots(req_to_token, request[None], lengths.new_tensor([[length]]), padded)
            plan.append((torch.arange(size) + start + first, slots, _mask(positions, padded)))
        start += count
    return plan


def attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[tuple[Tensor, Tensor, Tensor]],
    scale: float | None = None,
) -> Tensor:
    """Causal attention of ``query`` ``[tokens, heads, dim]`` into ``output``, over keys and values in the cache.

    Each part of ``plan`` is ``(rows [n] of query, slots [s, keys] in the cache, mask [n, 1, 1, keys])``; its tokens
    belong to s = n sequences or to one.
    """
    groups = k_cache.shape[1]
    for rows, slots, mask in plan:
        keys, values = (
            cache.view(len(cache), -1)
            .index_select(0, slots.view(-1))
            .view(*slots.shape, *cache.shape[1:])
            .transpose(1, 2)
            .expand(len(rows), -1, -1, -1)
            for cache in (k_cache, v_cache)
        )
        queries = query[rows].view(len(rows), groups, -1, query.shape[2])
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        output[rows] = found.reshape(len(rows), *output.shape[1:])
    return output


def _slots(req_to_token: Tensor, requests: Tensor, lengths: Tensor, padded: int) -> Tensor:
    """``[s, padded]``: where the keys lie in the cache; the first slot where there is none."""
    known = min(padded, req_to_token.shape[1])
    slots = torch.zeros(len(requests), padded, dtype=torch.long)
    slots[:, :known] = req_to_token[requests, :known]
    return slots.masked_fill_(torch.arange(padded) >= lengths, 0)


def _mask(positions: Tensor, padded: int) -> Tensor:
    later = torch.arange(padded) > positions[:, None]
    return torch.zeros(later.shape).masked_fill_(later, float("-inf"))[:, None, None]


def _refuse_other_attention(encoder_lens: Tensor | None, window: int | None, causal: bool = True) -> None:
    if encoder_lens is not None or window is not None or not causal:
        raise NotImplementedError("the deterministic mode on the CPU has causal self-attention over the whole sequence")


def _check_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if query.dtype != torch.float32:
        raise NotImplementedError(f"the deterministic mode on the CPU computes in float32, not {query.dtype}")
    groups = k_cache.shape[1]
    _check_shape(_attention_is_invariant, groups, query.shape[1] // groups, query.shape[2], v_cache.shape[2])


@functools.cache
def _check_shape(is_invariant: Callable[..., bool], *shape: Any) -> None:
    """Try a shape the first time it comes. Raises RuntimeError where this machine cannot keep the promise."""
    if not is_invariant(*shape):
        raise RuntimeError(
            f"{is_invariant.__name__[1:]} does not hold on this machine for {shape}: its results depend on the batch, "
            "so --deterministic cannot be offered here"
        )


def _attention_is_invariant(groups: int, shared: int, dim: int, value_dim: int) -> bool:
    """Whether a token among others, with more blocks of keys behind it, gets what it gets alone."""
    generator = torch.Generator().manual_seed(0)
    length, size = 2 * KEY_BLOCK, 5
    k_cache = torch.randn(length, groups, dim, generator=generator)
    v_cache = torch.randn(length, groups, value_dim, generator=generator)
    query = torch.randn(size, groups * shared, dim, generator=generator)
    slots = torch.arange(length)[None]
    for last in (size - 1, KEY_BLOCK - 1, KEY_BLOCK + 40):
        positions = torch.arange(last - size + 1, last + 1)
        together, alone = (torch.empty(size, groups * shared, value_dim) for _ in range(2))
        parts = [(torch.arange(size), slots, _mask(positions, length))]
        attend(query, together, k_cache, v_cache, parts)
        for row, position in enumerate(positions.tolist()):
            padded = (position // KEY_BLOCK + 1) * KEY_BLOCK
            part = (torch.tensor([row]), slots[:, :padded], _mask(positions[row : row + 1], padded))
            attend(query, alone, k_cache, v_cache, [part])
        if not torch.equal(together, alone):
            return False
    return True


# Sampling.


def sample_probabilities(probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """In the place of SGLang's ``sampling_from_probs_torch``: int32 ``[n]`` from ``probs`` ``[n, vocabulary]``."""
    return draw(probs, sampling_seed, positions).view(-1).to(torch.int32)


def sample_log_probabilities(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """In the place of SGLang's ``multinomial_with_seed`` (top-k and top-p): ``[n, 1]``."""
    return draw(torch.softmax(logprobs.double(), -1), seed, positions)


def draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Indices ``[n, 1]`` with probabilities in proportion to ``weights`` ``[n, m]``: inversion of the sum so far.

    Each row takes one number, which follows from its seed and the position of its token.
    """
    numbers = [[uniform(seed, at)] for seed, at in zip(seeds.tolist(), positions.tolist(), strict=True)]
    sums = weights.double().cumsum(-1)
    at = torch.tensor(numbers, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), of 52 bits, so that its product with a sum stays below the sum."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) * 2.0**-52
