"""Tiles of logits: how many exist at a time, and whether their softmax is kept for the backward pass. No torch.

`megatron/log_probs.py` computes in them, `planning.py` counts them.
"""

from __future__ import annotations

TILE_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
"""Size of one tile of float32 logits: small enough for a CPU's cache, large enough to keep a GPU busy."""
LEAST_ROWS = 512
"""Tokens of a tile. Where whole rows of logits are too long for that, tiles are cut along the vocabulary as well: the
weight is read once for so many tokens, and products of few rows are slow."""
KEEP_BYTES = 512 << 20
"""Softmax kept from forward to backward up to this size; beyond it, logits are computed again."""


def tiles(n: int, vocab: int, device: str) -> tuple[list[slice], list[slice]]:
    """Rows of ``n`` hidden states and rows of a weight of ``vocab`` (columns of logits) whose products are one tile
    each."""
    vocab, size = max(vocab, 1), TILE_BYTES[device] // 4
    rows, width = size // vocab, vocab
    if rows < min(n, LEAST_ROWS):
        rows = min(n, 2 * LEAST_ROWS)
        width = max(64, size // rows)
    return _cut(n, max(rows, 1)), _cut(vocab, width)


def is_kept(n: int, vocab: int, device: str) -> bool:
    """Whether the softmax of ``n`` tokens is kept for the backward pass."""
    return n * vocab * 4 <= KEEP_BYTES and len(tiles(n, vocab, device)[1]) == 1


def _cut(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
