"""The trainer's end of a weight sync: walks the parameters, packs buckets, broadcasts, checksums.

A :class:`WeightSender` lives in every Megatron rank, because exporting a parameter is a collective: all
ranks walk the same iterator in lockstep. Rank 0 packs and sends; the others only walk.

Layout of a bucket: the bytes of its tensors one after the other, without gaps, in the order of its
names. SGLang's receiver requires that each tensor starts at a multiple of its own item size, so a
tensor that would not starts a new bucket (only where dtypes are mixed).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.engines.control import Bucket, SendResult
from agentrl.weights.checksums import Checksums, Packed

LOOPBACK = ("127.0.0.1", "localhost")


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
        self._timeout = self._bucket_timeout = timedelta(seconds=timeout)
        self._tied = tied_embeddings
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
        self._store: dist.Store | None = None
        self._groups: dict[str, Any] = {}
        self._walk: Iterator[Packed] | None = None
        self._current: Packed | None = None
        self._buffers: list[torch.Tensor] = []
        self._hashes = Checksums(tp=tp, num_kv_heads=num_kv_heads)

    # The group.

    def listen(self, host: str = "127.0.0.1") -> int:
        """The port on ``host`` where groups are formed, open from now until :meth:`abort`. Waits for nobody."""
        if self._rank != 0:
            return 0
        if self._store is not None:
            return self._store.port
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

    def connect(
        self, groups: dict[str, int], timeout: float = 30.0, bucket_timeout: float | None = None
    ) -> dict[str, str]:
        """Form those groups whose engines have come to the rendezvous. Call again for the others.

        Waits half a second at most for engines to come: once a group is being formed nothing
        can stop the wait for a member, so it is formed only when all are there.

        Args:
            groups: name to world size. This process is rank 0 of each.
            timeout: seconds that forming a group may take.
            bucket_timeout: seconds after which a blocked broadcast fails, if not the sender's own ``timeout``.

        Returns:
            The state of each: ``formed``, ``waiting`` for its engines, or why it could not be formed.
        """
        if self._rank != 0:
            return {}
        if bucket_timeout is not None:
            self._bucket_timeout = timedelta(seconds=bucket_timeout)
        deadline = time.monotonic() + 0.5
        while (present := self._present(groups)) != set(groups) and time.monotonic() < deadline:
            time.sleep(0.005)
        states = dict.fromkeys(groups, "waiting")
        self._store.set_timeout(timedelta(seconds=timeout))
        # One thread a group: each waits for its own engines.
        with _environment(self._backend_settings()), ThreadPoolExecutor(max_workers=len(groups) or 1) as pool:
            forming = {name: pool.submit(self._form, name, groups[name]) for name in present}
        for name, future in forming.items():
            error = future.exception()
            states[name] = "formed" if error is None else f"{type(error).__name__}: {error}"
            if error is None:
                self._groups[name] = future.result()
        return states

    def _present(self, groups: dict[str, int]) -> set[str]:
        """Groups all of whose engines have left their address in the store."""
        if self._backend == "nccl":  # members meet at the first broadcast
            return set(groups)
        keys = self._store.list_keys()
        count = {name: sum(key.startswith(f"{name}/") for key in keys) for name in groups}
        return {name for name, size in groups.items() if count[name] >= size - 1}

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
            timeout=self._bucket_timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return group

    def _backend_settings(self) -> dict[str, str]:
        """Environment in which a group is made."""
        if self._backend == "nccl":
            # Its watchdog would end the trainer when an engine hangs; deadlines here are our own.
            return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        return {"GLOO_SOCKET_IFNAME": "lo"} if self._loopback else {}

    def drop(self, name: str) -> None:
        """Leave one group, whatever state it is in."""
        group = self._groups.pop(name, None)
        if group is None:
            return
        if self._backend == "nccl":  # a communicator with a lost member can only be aborted
            from torch.distributed.distributed_c10d import _abort_process_group

            _abort_process_group(group)
        else:
            dist.destroy_process_group(group)

    def abort(self) -> None:
        """Leave all groups and close the rendezvous: engines that wait for this end get an error."""
        for name in list(self._groups):
            self.drop(name)
        self._store = None

    # The walk.

    def start(self) -> Bucket | None:
        """Begin a walk over the parameters and pack the first bucket."""
        self._hashes.clear()
        self._walk = self._pack()
        return self._advance()

    def broadcast(self, groups: list[str] | None = None) -> SendResult:
        """Send the current bucket to these groups, by default to all, and pack the next one."""
        failed = self._send(self._current, groups) if self._rank == 0 else {}
        return SendResult(self._advance(), failed)

    def _send(self, packed: Packed, groups: list[str] | None) -> dict[str, str]:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        works: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for name, group in self._groups.items():
            if groups is not None and name not in groups:
                continue
            try:
                works[name] = group.broadcast([packed.flat], options)
            except RuntimeError as error:
                failed[name] = str(error)
        for name, work in works.items():
            try:
                self._finish(work)
            except RuntimeError as error:
                failed[name] = str(error)
        for name in failed:
            self.drop(name)
        return failed

    def _finish(self, work: Any) -> None:
        """Wait for a broadcast. Raises RuntimeError when it failed or took too long."""
        if self._backend != "nccl":
            work.wait()  # has the group's timeout
            return
        # There `wait` only orders streams: it neither waits nor fails.
        deadline = time.monotonic() + self._bucket_timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end of the broadcast after {self._bucket_timeout.total_seconds():g} s")
            time.sleep(0.0005)
        if work.exception() is not None:
            raise RuntimeError(str(work.exception()))

    def _advance(self) -> Bucket | None:
        if self._rank == 0 and self._current is not None and not self._current.bucket.last:
            self._hashes.add_later(self._current)
        last_one = self._current
        self._current = next(self._walk, None)
        if self._current is None:
            self._current = last_one
            return None
        return self._current.bucket

    def _pack(self) -> Iterator[Packed]:
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
        from agentrl.data.tensor_file import save_tensors

        partial = Path(f"{path}.partial")
        total = 0
        if self._rank == 0:
            partial.mkdir(parents=True)
        bucket = self.start()
        index = 0
        while bucket is not None:
            if self._rank == 0:
                tensors = dict(self._current.named_tensors())
                save_tensors(tensors, partial / f"model-{index:05d}.safetensors")
                total += bucket.nbytes
            index += 1
            bucket = self._advance()
        if self._rank == 0:
            partial.rename(path)
        return total


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

    def close(self, *, last: bool) -> Packed:
        flat = self._sender._buffers[self._which][: self._offset]
        bucket = Bucket(tuple(self._names), tuple(self._dtypes), tuple(self._shapes), self._offset, last)
        return Packed(bucket, flat, self._which)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and set them back."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
