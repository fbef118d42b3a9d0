"""Attention on the CPU in a few calls a layer.

SGLang's own attention for plain PyTorch goes through the sequences of a batch in Python, one call each, and computes
the cached prefix of a prompt anew. Here the tokens of a batch are sorted into :class:`Part` objects, each computed by
one call: sequences that decode, or pieces of prompts, of like length together, padded to the longest. What stands
where is planned once a batch, for all layers.

A plan is all that a subclass decides: :class:`BatchedAttention` is the engine's usual one, and
:class:`~agentrl.engines.cpu_deterministic.InvariantAttention` computes each token by itself. What neither computes
(cross attention, a sliding window, encoders) goes to :meth:`PlannedAttention.other`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERY_CHUNK = 256
"""Tokens of a prompt in one piece: bounds the memory of its mask, and what is computed only to be masked."""
CALL_COST = 4096
"""What a call costs by itself, in pairs of a query and a key (measured, about 60 µs)."""
COPY_COST = 2
"""What copying a key and its value out of the cache costs, in the same unit."""
PART_BYTES = 32 << 20
"""Most that keys, values and mask of a part may take, unless it is one piece."""
PLAN_BYTES = 64 << 20
"""Most that the masks of a plan may take; further ones are made anew in each layer."""


@dataclass(frozen=True)
class Part:
    """Tokens computed in one call: q of each of n pieces. Padding repeats a token of the piece."""

    rows: Tensor
    """``[n, q]``: the tokens' rows in the query."""
    positions: Tensor
    """``[n, q]``: each token's place in its sequence; it sees the keys up to there."""
    slots: Tensor
    """``[n, k]``, or ``[1, k]`` for pieces of one sequence: where the keys lie in the cache."""
    real: Tensor | None = None
    """``[n, q]``: which are not padding; None: all of them."""
    mask: Tensor | None = None
    """See :meth:`masked`."""

    def masked(self, dtype: torch.dtype) -> Tensor:
        """``[n, 1, q, k]``: 0 for the keys that a token sees, minus infinity for the others."""
        if self.mask is not None:
            return self.mask
        later = torch.arange(self.slots.shape[1]) > self.positions[..., None]
        return torch.zeros(later.shape, dtype=dtype).masked_fill_(later, float("-inf"))[:, None]


def use_attention(mixin: type[PlannedAttention]) -> None:
    """Have SGLang's attention for plain PyTorch compute in this way. Call it before the engine starts."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    attention_registry.ATTENTION_BACKENDS["torch_native"] = type(mixin.__name__, (mixin, TorchNativeAttnBackend), {})


class PlannedAttention:
    """Causal attention by a plan. Mixed into SGLang's attention for plain PyTorch, which keeps the cache."""

    _plan: list[Part] | None = None

    def plan(self, table: Tensor, requests: Tensor, lengths: Tensor, new: Tensor, bytes_a_key: int) -> list[Part]:
        """How the last ``new[i]`` tokens of each sequence are computed.

        Args:
            table: SGLang's ``req_to_token``: a row of slots in the cache for each request.
            requests: ``[n]``: the row of each sequence.
            lengths: ``[n]``: tokens of each sequence, the new ones included.
            new: ``[n]``: how many tokens of each the query holds, one sequence after the other.
            bytes_a_key: of a key and its value in one layer.
        """
        raise NotImplementedError

    def other(self, method: str, *args: Any, **kwargs: Any) -> Tensor:
        """Attention that no plan describes."""
        raise NotImplementedError

    def attend(self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float | None) -> Tensor:
        """See :func:`attend`."""
        assert self._plan is not None
        return attend(query, output, k_cache, v_cache, self._plan, scale)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Forget the last batch."""
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]  # of the class it is mixed into
        self._plan = None

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if is_other(query, k_cache, encoder_lens, **{**options, "causal": True}):
            return self.other(
                "_run_sdpa_forward_decode", query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                encoder_lens, **options,
            )  # fmt: skip
        if self._plan is None:
            ones = torch.ones_like(seq_lens)
            self._make_plan(query, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, ones)
        return self.attend(query, output, k_cache, v_cache, options.get("scaling"))

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if is_other(query, k_cache, encoder_lens, **options):
            return self.other(
                "_run_sdpa_forward_extend", query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, **options,
            )  # fmt: skip
        if self._plan is None:
            self._make_plan(query, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_seq_lens)
        return self.attend(query, output, k_cache, v_cache, options.get("scaling"))

    def _make_plan(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, requests: Tensor, lengths: Tensor,
        new: Tensor,
    ) -> None:  # fmt: skip
        size = (k_cache[0].numel() + v_cache[0].numel()) * k_cache.element_size()
        kept, self._plan = 0, []
        for part in self.plan(table, requests, lengths, new, size):
            kept += part.rows.numel() * part.slots.shape[1] * query.element_size()
            self._plan.append(replace(part, mask=part.masked(query.dtype)) if kept <= PLAN_BYTES else part)


def is_other(
    query: Tensor,
    k_cache: Tensor,
    encoder_lens: Tensor | None = None,
    *,
    causal: bool = False,
    sliding_window_size: int | None = None,
    **_: Any,
) -> bool:
    """Whether this is anything but causal self-attention over the whole sequence in one precision."""
    window = sliding_window_size is not None and sliding_window_size > -1
    return encoder_lens is not None or window or not causal or query.dtype != k_cache.dtype


class BatchedAttention(PlannedAttention):
    """Pieces of like length in one call, as far as padding costs less than another call would."""

    def plan(self, table: Tensor, requests: Tensor, lengths: Tensor, new: Tensor, bytes_a_key: int) -> list[Part]:
        return plan_batched(table, requests, lengths, new, bytes_a_key)

    def other(self, method: str, *args: Any, **kwargs: Any) -> Tensor:
        """SGLang's own way."""
        return getattr(super(PlannedAttention, self), method)(*args, **kwargs)


def plan_batched(table: Tensor, requests: Tensor, lengths: Tensor, new: Tensor, bytes_a_key: int) -> list[Part]:
    """See :meth:`PlannedAttention.plan`."""
    pieces, start = [], 0
    for request, length, count in zip(requests.tolist(), lengths.tolist(), new.tolist(), strict=True):
        for first in range(0, count, QUERY_CHUNK):
            size = min(QUERY_CHUNK, count - first)
            pieces.append((size, length - count + first + size, start + first, request))
        start += count
    return [_part(bucket, table) for bucket in buckets(pieces, bytes_a_key)]


Piece = tuple[int, int, int, int]
"""Tokens, keys, row of the first token in the query, request."""


def buckets(pieces: list[Piece], bytes_a_key: int, item: int = 4) -> Iterator[list[Piece]]:
    """The pieces, sorted, in buckets of which each is one call."""
    bucket: list[Piece] = []
    spent = most_keys = 0
    for piece in sorted(pieces):
        queries, keys = piece[0], max(most_keys, piece[1])  # sorted: its queries are the most
        padded = (len(bucket) + 1) * keys
        alone = piece[1] * (queries + COPY_COST) + CALL_COST
        together = padded * (queries + COPY_COST) + CALL_COST
        if bucket and (together > spent + alone or padded * (bytes_a_key + item * queries) > PART_BYTES):
            yield bucket
            bucket, keys, together = [], piece[1], alone
        bucket.append(piece)
        spent, most_keys = together, keys
    if bucket:
        yield bucket


def _part(bucket: list[Piece], table: Tensor) -> Part:
    size, keys, start, request = torch.tensor(bucket).unbind(1)
    places, longest = torch.arange(int(size[-1])), int(keys.max())
    within = torch.minimum(places, size[:, None] - 1)
    slots = table[request, :longest].long().masked_fill_(torch.arange(longest) >= keys[:, None], 0)
    real = None if size[0] == size[-1] else places < size[:, None]
    return Part(start[:, None] + within, (keys - size)[:, None] + within, slots, real)


def attend(
    query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, plan: list[Part], scale: float | None = None
) -> Tensor:
    """Causal attention of ``query`` ``[tokens, heads, dim]`` into ``output``, over keys and values in the cache.

    Args:
        k_cache, v_cache: ``[slots, groups, dim]``; heads of one group share keys and values.
        plan: parts that hold every token.
    """
    heads, groups = query.shape[1], k_cache.shape[1]
    for part in plan:
        n, size = part.rows.shape
        keys, values = (
            cache.view(len(cache), -1)
            .index_select(0, part.slots.view(-1))
            .view(*part.slots.shape, *cache.shape[1:])
            .transpose(1, 2)
            .expand(n, -1, -1, -1)
            for cache in (k_cache, v_cache)
        )
        queries, mask = query[part.rows], part.masked(query.dtype)
        if size == 1:  # the heads of a group are the rows of one product
            queries = queries.view(n, groups, heads // groups, -1)
            found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            found = found.reshape(n, 1, heads, -1)
        else:
            found = scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=heads != groups
            ).transpose(1, 2)
        if part.real is None:
            output[part.rows] = found
        else:
            output[part.rows[part.real]] = found[part.real]
    return output
