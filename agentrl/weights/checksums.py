"""SGLang's own checksums, predicted by the sender, so that what an engine holds can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from agentrl.engines.control import Bucket
from agentrl.weights.protocol import UNPREDICTED

# Parameters that SGLang's dense models (Llama, Qwen2, Qwen3) hold fused: part -> whole, place.
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
VOCAB_PADDING = 64
"""SGLang pads the rows of embedding and head to a multiple of this, with zeros."""


@dataclass
class Packed:
    """A filled bucket. ``which`` is the buffer that holds it."""

    bucket: Bucket
    flat: torch.Tensor
    which: int

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        offset = 0
        for name, dtype, shape in zip(self.bucket.names, self.bucket.dtypes, self.bucket.shapes, strict=True):
            torch_dtype = getattr(torch, dtype)
            size = torch.Size(shape).numel() * torch_dtype.itemsize
            yield name, self.flat[offset : offset + size].view(torch_dtype).view(shape)
            offset += size


class Checksums:
    """SGLang's per-parameter checksums, computed from HF parameters while they are at hand.

    SGLang hashes each parameter it holds: on the CPU the first 8 bytes of SHA-256 over its bytes, on the GPU a
    hash of its own (:func:`gpu_hash`); both as 16 hexadecimal digits. Fused parameters are the
    concatenation of their parts along the rows; embedding and head are padded with zero rows.
    """

    def __init__(self, *, tp: int = 1, num_kv_heads: int | None = None) -> None:
        self._tp = tp
        self._kv_heads = num_kv_heads
        self._digests: list[dict[str, str]] = []
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        self._running: dict[int, Future[None]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-checksum")
        self.clear()

    def clear(self) -> None:
        """Forget the last walk."""
        for which in list(self._running):
            self.wait_for(which)
        self._digests = [{} for _ in range(self._tp)]
        self._parts = {}

    def add_later(self, packed: Packed) -> None:
        """Hash a bucket in the background; its buffer may be reused after :meth:`wait_for`."""
        self._running[packed.which] = self._pool.submit(self._add, packed)

    def wait_for(self, which: int) -> None:
        """Wait until the background hash of a buffer is done."""
        future = self._running.pop(which, None)
        if future is not None:
            future.result()

    def add(self, packed: Packed) -> None:
        """Hash a bucket now."""
        for which in list(self._running):
            self.wait_for(which)
        self._add(packed)

    def result(self) -> list[dict[str, str]]:
        """All checksums so far by the engine's names, :data:`UNPREDICTED` among them.

        A fused parameter of which parts are missing is left out: it was not sent.
        """
        return [dict(digests) for digests in self._digests]

    def _add(self, packed: Packed) -> None:
        for name, tensor in packed.named_tensors():
            self._add_tensor(name, tensor)

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        pieces = name.split(".")
        module = pieces[-2] if len(pieces) > 1 else ""
        if module in FUSED:
            whole, place = FUSED[module]
            fused_name = ".".join([*pieces[:-2], whole, pieces[-1]])
            parts = self._parts.setdefault(fused_name, {})
            # The buffer is reused: a part that waits for the others must be kept.
            parts[place] = tensor
            if len(parts) < (3 if whole == "qkv_proj" else 2):
                parts[place] = tensor.clone()
                return
            tensors = [parts[index] for index in sorted(parts)]
            del self._parts[fused_name]
            self._digest(fused_name, whole, tensors)
        else:
            self._digest(name, module, [tensor])

    def _digest(self, name: str, module: str, tensors: list[torch.Tensor]) -> None:
        for rank in range(self._tp):
            shards = [self._shard(module, tensor, rank) for tensor in tensors]
            if any(shard is None for shard in shards):
                self._digests[rank][name] = UNPREDICTED
                continue
            if module in ("embed_tokens", "lm_head"):
                rows = shards[0].shape[0]
                missing = -(-rows // VOCAB_PADDING) * VOCAB_PADDING - rows
                shards.append(shards[0].new_zeros(missing, *shards[0].shape[1:]))
            digest = gpu_hash(shards) if shards[0].is_cuda else cpu_hash(shards)
            self._digests[rank][name] = f"{digest:016x}"

    def _shard(self, module: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
        """What a tensor-parallel rank holds; ``None`` where that is not a plain equal split."""
        if self._tp == 1:
            return tensor
        if module in ("o_proj", "down_proj"):
            dim = 1 if tensor.dim() == 2 else None
        elif module in ("qkv_proj", "gate_up_proj", "embed_tokens", "lm_head"):
            dim = 0
        else:
            dim = None
        if module == "qkv_proj" and (self._kv_heads is None or self._kv_heads % self._tp):
            return None
        if dim is None:
            return tensor
        if tensor.shape[dim] % self._tp or (
            module in ("embed_tokens", "lm_head") and tensor.shape[0] % (VOCAB_PADDING * self._tp)
        ):
            return None
        return tensor.chunk(self._tp, dim)[rank]


def cpu_hash(parts: list[torch.Tensor]) -> int:
    """SGLang's 64-bit hash of the concatenation of CPU tensors: the head of SHA-256 over the bytes."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(memoryview(part.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return int.from_bytes(sha.digest()[:8], "big")


_WORD = 0xFFFFFFFF
_TILE = 8192
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))
_CHUNK = 512  # tiles at a time, to bound the temporaries: 4 Mi words


def gpu_hash(parts: list[torch.Tensor]) -> int:
    """SGLang's 64-bit hash of the concatenation of GPU tensors, in plain torch operations on any device.

    Each 32-bit word is mixed with its position under two seeds (the finalizer of MurmurHash3), summed over tiles of
    8,192 words and mixed with the length; the tiles' 64-bit values are summed and mixed by the finalizer
    of SplitMix64. All arithmetic is modulo 2**32 or 2**64; int64 wraps, which keeps the low bits right.
    """
    flat = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words = flat.view(torch.int32)
    if words.numel() == 0:
        return 0
    total = 0
    for start in range(0, words.numel(), _CHUNK * _TILE):
        value = words[start : start + _CHUNK * _TILE].long() & _WORD
        index = torch.arange(start, start + value.numel(), device=value.device)
        halves = []
        for seed, (factor, turn) in zip(_SEEDS, _POSITION, strict=True):
            turned = ((index << turn) | (index >> (32 - turn))) & _WORD
            mixed = _mix(value ^ ((index * factor + seed) & _WORD) ^ turned)
            mixed = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE))
            sums = mixed.view(-1, _TILE).sum(1) & _WORD
            halves.append(_mix(sums ^ ((words.numel() * 4) & _WORD)))
        total += int(((halves[0] << 32) | halves[1]).sum())
    return _finish(total & (_WORD << 32 | _WORD))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _WORD
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def _finish(x: int) -> int:
    mask = _WORD << 32 | _WORD
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & mask
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
