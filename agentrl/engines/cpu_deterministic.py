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

from agentrl.engines.cpu_attention import QUERY_CHUNK, Part, PlannedAttention, attend, use_attention

TILE = 32
"""Rows of each matrix product."""
KEY_BLOCK = 512
"""Keys that torch's flash attention on the CPU sums at once; whole blocks of masked keys change no bit."""

_library: torch.library.Library | None = None


def install() -> None:
    """Let SGLang serve deterministically on the CPU. Call it before its arguments are parsed."""
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import sampler
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    use_attention(InvariantAttention)
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


class InvariantAttention(PlannedAttention):
    """Attention of which each query token is computed alike, in a prompt and alone. Mixed into SGLang's own for torch.

    A token's queries are the rows of one call of flash attention, the heads that share a key head together. The
    tokens of a call, and the sequences, are its batch, whose entries it computes one by one.
    """

    def plan(self, table: Tensor, requests: Tensor, lengths: Tensor, new: Tensor, bytes_a_key: int) -> list[Part]:
        return plan_invariant(table, requests, lengths, new)

    def attend(self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float | None) -> Tensor:
        if query.dtype != torch.float32:
            self.other("attend", query)
        groups = k_cache.shape[1]
        _check_shape(_attention_is_invariant, groups, query.shape[1] // groups, query.shape[2], v_cache.shape[2])
        return super().attend(query, output, k_cache, v_cache, scale)

    def other(self, method: str, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(
            "the deterministic mode on the CPU has causal self-attention over the whole sequence, in float32; "
            f"this model asks for something else ({query.dtype}, {kwargs})"
        )


def plan_invariant(table: Tensor, requests: Tensor, lengths: Tensor, new: Tensor) -> list[Part]:
    """Tokens one by one, with whole blocks of keys. See :meth:`PlannedAttention.plan`.

    The tokens of a prompt are a part, or several; where each sequence has one token, all with as many blocks are.
    """
    if bool((new == 1).all()):
        blocks = (lengths - 1) // KEY_BLOCK + 1
        chosen = [(blocks == count).nonzero().view(-1) for count in blocks.unique()]
        return [_tokens(rows, lengths[rows] - 1, table, requests[rows], lengths[rows]) for rows in chosen]
    plan, start = [], 0
    for i, (length, count) in enumerate(zip(lengths.tolist(), new.tolist(), strict=True)):
        for first in range(0, count, QUERY_CHUNK):
            within = torch.arange(first, min(first + QUERY_CHUNK, count))
            at = length - count + within
            plan.append(_tokens(start + within, at, table, requests[i : i + 1], lengths[i : i + 1]))
        start += count
    return plan


def _tokens(rows: Tensor, positions: Tensor, table: Tensor, requests: Tensor, lengths: Tensor) -> Part:
    """A part of single tokens, with as many blocks of keys as the last of them needs."""
    padded = (int(positions.max()) // KEY_BLOCK + 1) * KEY_BLOCK
    known = min(padded, table.shape[1])
    slots = torch.zeros(len(requests), padded, dtype=torch.long)
    slots[:, :known] = table[requests, :known]
    slots.masked_fill_(torch.arange(padded) >= lengths[:, None], 0)  # the first slot, where there is no key
    return Part(rows[:, None], positions[:, None], slots)


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
        attend(query, together, k_cache, v_cache, [Part(torch.arange(size)[:, None], positions[:, None], slots)])
        for row, position in enumerate(positions.tolist()):
            padded = (position // KEY_BLOCK + 1) * KEY_BLOCK
            part = Part(torch.tensor([[row]]), torch.tensor([[position]]), slots[:, :padded])
            attend(query, alone, k_cache, v_cache, [part])
        if not torch.equal(together, alone):
            return False
    return True


# Sampling.


def sample_probabilities(probs: Tensor, sampling_seed: Tensor, positions: Tensor) -> Tensor:
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
