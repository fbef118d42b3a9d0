"""The trainer's end of a weight sync: walks the parameters, packs buckets, broadcasts, checksums.

A :class:`WeightSender` lives in every Megatron rank, because exporting a parameter is a collective: all
ranks walk the same iterator in lockstep. Rank 0 packs and sends; the others only walk.

Layout of a bucket: the bytes of its tensors one after the other, without gaps, in the order of its
names. SGLang's receiver requires that each tensor starts at a multiple of its own item size, so a
tensor that would not starts a new bucket (only where dtypes are mixed).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.rollout.control import Bucket

LOOPBACK = ("127.0.0.1", "localhost")

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


@dataclass(frozen=True)
class SendResult:
    """What a broadcast brought: the next bucket (``None`` after the last), and groups that failed."""

    next: Bucket | None
    failed: dict[str, str] = field(default_factory=dict)


class WeightSender:
    """Packs and sends one model's weights, version after version.

    Args:
        export: gives a fresh iterator of (HF parameter name, full tensor) each time it is called.
            Collective: every rank must call and exhaust it the same way.
        bucket_bytes: a bucket is sent when it holds this much; a larger tensor travels alone.
        dtype: cast to this before sending (the engine's dtype); ``None`` sends as exported.
        backend: ``gloo`` (CPU) or ``nccl``.
        rank: this process's rank in the trainer; only rank 0 packs, sends and hashes.
        timeout: seconds after which a blocked broadcast or rendezvous fails.
        tied_embeddings: the engine has no head of its own, so ``lm_head.weight`` is not sent.
        tp: tensor-parallel size of the engines, for checksums.
        num_kv_heads: key-value heads of the model; needed for checksums of attention when ``tp > 1``.
    """

    def __init__(
        self,
        export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        bucket_bytes: int = 512 << 20,
        dtype: torch.dtype | None = None,
        backend: str = "gloo",
        rank: int = 0,
        timeout: float = 120.0,
        tied_embeddings: bool = False,
        tp: int = 1,
        num_kv_heads: int | None = None,
    ) -> None:
        self._export = export
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._backend = backend
        self._rank = rank
        self._timeout = timedelta(seconds=timeout)
        self._tied = tied_embeddings
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
        self._store: dist.Store | None = None
        self._groups: dict[str, Any] = {}
        self._walk: Iterator[_Packed] | None = None
        self._current: _Packed | None = None
        self._buffers: list[torch.Tensor] = []
        self._hashes = Checksums(tp=tp, num_kv_heads=num_kv_heads)

    # The group.

    def listen(self, host: str = "127.0.0.1") -> int:
        """Open the rendezvous on ``host`` and return its port. Does not wait for anybody."""
        if self._rank != 0:
            return 0
        self.abort()
        listener = socket.create_server((host, 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        self._loopback = host in LOOPBACK
        return port

    def arrived(self, groups: dict[str, int]) -> list[str]:
        """Which of these groups (name to world size) have all their engines at the rendezvous."""
        if self._rank != 0 or self._backend == "nccl":  # NCCL meets at the first broadcast
            return list(groups)
        keys = self._store.list_keys()
        present = {name: sum(key.startswith(f"{name}/") for key in keys) for name in groups}
        return [name for name, size in groups.items() if present[name] >= size - 1]

    def connect(self, groups: dict[str, int], timeout: float = 30.0) -> dict[str, str]:
        """Form groups with the engines, which join at the same time. Blocks until all have.

        Args:
            groups: name to world size. This process is rank 0 of each.
            timeout: seconds until all members must have joined.

        Returns:
            Groups that could not be formed, with the reason.
        """
        if self._rank != 0:
            return {}
        self._store.set_timeout(timedelta(seconds=timeout))
        # One thread a group: each waits for its own engines.
        with _gloo_on_loopback(self._loopback), ThreadPoolExecutor(max_workers=len(groups) or 1) as pool:
            formed = {name: pool.submit(self._form, name, size) for name, size in groups.items()}
        failed = {}
        for name, future in formed.items():
            error = future.exception()
            if error is None:
                self._groups[name] = future.result()
            else:
                failed[name] = str(error)
        return failed

    def _form(self, name: str, world_size: int) -> Any:
        """What ``init_process_group`` does, as SGLang's side does it, without becoming the default group."""
        from torch.distributed import distributed_c10d as c10d

        group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend(self._backend),
            c10d.PrefixStore(name, self._store),
            group_name=name,
            timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return group

    def drop(self, name: str) -> None:
        """Leave one group."""
        group = self._groups.pop(name, None)
        if group is not None:
            dist.destroy_process_group(group)

    def abort(self) -> None:
        """Leave all groups and close the rendezvous: engines that wait for this end get an error."""
        for name in list(self._groups):
            self.drop(name)
        self._store = None
        self._walk = self._current = None

    # The walk.

    def start(self) -> Bucket | None:
        """Begin a walk over the parameters and pack the first bucket."""
        self._hashes.clear()
        self._walk = self._pack()
        return self._advance()

    def broadcast(self) -> SendResult:
        """Send the current bucket to all groups, and pack the next one."""
        if self._rank == 0:
            failed = self._send(self._current)
        else:
            failed = {}
        return SendResult(self._advance(), failed)

    def _send(self, packed: _Packed) -> dict[str, str]:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        works: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for name, group in self._groups.items():
            try:
                works[name] = group.broadcast([packed.flat], options)
            except RuntimeError as error:
                failed[name] = str(error)
        for name, work in works.items():
            try:
                work.wait()
            except RuntimeError as error:
                failed[name] = str(error)
        if packed.flat.is_cuda:
            torch.cuda.synchronize(packed.flat.device)
        for name in failed:
            self.drop(name)
        return failed

    def _advance(self) -> Bucket | None:
        if self._current is not None and not self._current.bucket.last:
            self._hashes.add_later(self._current)
        last_one = self._current
        self._current = next(self._walk, None)
        if self._current is None:
            self._current = last_one
            return None
        return self._current.bucket

    def _pack(self) -> Iterator[_Packed]:
        """Pack the export into buckets, alternating between two buffers."""
        turns = itertools.cycle((0, 1))
        tensors = self._tensors()
        pending = next(tensors, None)
        while pending is not None:
            which = next(turns)
            self._hashes.wait_for(which)
            pack = _Packing(self, which)
            while pending is not None and pack.takes(pending[1]):
                pack.add(*pending)
                pending = next(tensors, None)
            yield pack.close(last=pending is None)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._export():
            if self._tied and name == "lm_head.weight":
                continue
            yield name, tensor

    # Other ways out.

    def checksums(self) -> list[dict[str, str]]:
        """Checksums of what the last walk sent, named and fused as the engine holds it; one dict a rank."""
        if self._rank != 0:
            return []
        if self._current is not None:
            self._hashes.add(self._current)
        return self._hashes.result()

    def save(self, path: str) -> int:
        """Write the weights as safetensors files into a new folder; returns the bytes written.

        The folder appears under its name only when it is complete.
        """
        from safetensors.torch import save_file

        partial = Path(f"{path}.partial")
        total = 0
        if self._rank == 0:
            partial.mkdir(parents=True)
        bucket = self.start()
        index = 0
        while bucket is not None:
            if self._rank == 0:
                tensors = dict(self._current.named_tensors())
                save_file(tensors, partial / f"model-{index:05d}.safetensors", metadata={"format": "pt"})
                total += bucket.nbytes
            index += 1
            bucket = self._advance()
        if self._rank == 0:
            partial.rename(path)
        return total


@dataclass
class _Packed:
    bucket: Bucket
    flat: torch.Tensor
    which: int

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        offset = 0
        for name, dtype, shape in zip(
            self.bucket.names, self.bucket.dtypes, self.bucket.shapes, strict=True
        ):
            torch_dtype = getattr(torch, dtype)
            size = torch.Size(shape).numel() * torch_dtype.itemsize
            yield name, self.flat[offset : offset + size].view(torch_dtype).view(shape)
            offset += size


class _Packing:
    """One bucket while it is filled."""

    def __init__(self, sender: WeightSender, which: int) -> None:
        self._sender = sender
        self._which = which
        self._names: list[str] = []
        self._dtypes: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._offset = 0
        while len(sender._buffers) <= which:
            sender._buffers.append(torch.empty(0, dtype=torch.uint8, device=sender._device))

    def _size(self, tensor: torch.Tensor) -> tuple[torch.dtype, int]:
        dtype = self._sender._dtype or tensor.dtype
        return dtype, tensor.numel() * dtype.itemsize

    def takes(self, tensor: torch.Tensor) -> bool:
        if not self._names:
            return True
        dtype, size = self._size(tensor)
        fits = self._offset + size <= self._sender._bucket_bytes
        return fits and self._offset % dtype.itemsize == 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        dtype, size = self._size(tensor)
        if self._sender._rank == 0:
            buffer = self._room(self._offset + size)
            place = buffer[self._offset : self._offset + size].view(dtype).view(tensor.shape)
            place.copy_(tensor.detach())
        self._names.append(name)
        self._dtypes.append(str(dtype).removeprefix("torch."))
        self._shapes.append(tuple(tensor.shape))
        self._offset += size

    def _room(self, size: int) -> torch.Tensor:
        """The buffer, grown to ``size`` bytes: to twice what it was, but not beyond a bucket."""
        buffers = self._sender._buffers
        buffer = buffers[self._which]
        if buffer.numel() < size:
            grown = max(size, min(2 * buffer.numel(), self._sender._bucket_bytes))
            bigger = torch.empty(grown, dtype=torch.uint8, device=self._sender._device)
            bigger[: self._offset].copy_(buffer[: self._offset])
            buffers[self._which] = buffer = bigger
        return buffer

    def close(self, *, last: bool) -> _Packed:
        flat = self._sender._buffers[self._which][: self._offset]
        bucket = Bucket(
            tuple(self._names), tuple(self._dtypes), tuple(self._shapes), self._offset, last
        )
        return _Packed(bucket, flat, self._which)


class Checksums:
    """SGLang's per-parameter checksums, computed from HF parameters while they are at hand.

    SGLang hashes each parameter it holds with SHA-256 over the bytes and keeps the first 8 bytes, as
    hexadecimal (``tensor_hash`` for CPU tensors). Fused parameters are the concatenation of their
    parts along the rows; embedding and head are padded with zero rows.
    On the GPU SGLang uses another hash, so parameters there are left out and only engines are compared
    with each other.
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

    def add_later(self, packed: _Packed) -> None:
        """Hash a bucket in the background; its buffer may be reused after :meth:`wait_for`."""
        if not packed.flat.is_cuda:
            self._running[packed.which] = self._pool.submit(self._add, packed)

    def wait_for(self, which: int) -> None:
        """Wait until the background hash of a buffer is done."""
        future = self._running.pop(which, None)
        if future is not None:
            future.result()

    def add(self, packed: _Packed) -> None:
        """Hash a bucket now."""
        for which in list(self._running):
            self.wait_for(which)
        if not packed.flat.is_cuda:
            self._add(packed)

    def result(self) -> list[dict[str, str]]:
        """All checksums so far; a fused parameter of which parts are missing is left out."""
        return [dict(digests) for digests in self._digests]

    def _add(self, packed: _Packed) -> None:
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
                return
            sha = hashlib.sha256()
            for shard in shards:
                sha.update(memoryview(shard.contiguous().reshape(-1).view(torch.uint8).numpy()))
            if module in ("embed_tokens", "lm_head"):
                rows = shards[0].shape[0]
                missing = -(-rows // VOCAB_PADDING) * VOCAB_PADDING - rows
                sha.update(bytes(missing * shards[0][0].numel() * shards[0].element_size()))
            self._digests[rank][name] = sha.hexdigest()[:16]

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


@contextlib.contextmanager
def _gloo_on_loopback(wanted: bool) -> Iterator[None]:
    """Have gloo open its listening socket on the loopback interface."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    if wanted:
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if wanted:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before

