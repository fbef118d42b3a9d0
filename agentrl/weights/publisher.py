"""Publishing: the trainer's ranks write a version of the weights out, once, for all who need it.

A version is a folder of safetensors files in shared memory, or on a disk. The bytes of a file after its header are the
bucket that a broadcast sends. The one before is removed first, so that there is one copy at a time; who reads it still
can go on doing so, or fails and waits for the new one.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from agentrl.engines.control import Bucket
from agentrl.errors import StorageError, WeightSyncError
from agentrl.weights.snapshot import Snapshot

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Of safetensors."""


class Publisher:
    """Stands in every rank, because exporting a parameter is a collective. Rank 0 writes; the others only walk.

    Args:
        export: gives a fresh iterator of (HF parameter name, full tensor) each time it is called. Collective: every
            rank must call and exhaust it the same way, and it gives the same names and shapes each time.
        folder: where versions are put.
        rank: this process's rank in the trainer.
        bucket_bytes: a file holds so much; a larger tensor has one alone.
        tied_embeddings: engines have no head of their own, so ``lm_head.weight`` is left out.
    """

    def __init__(
        self,
        export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        folder: str | os.PathLike[str],
        *,
        rank: int = 0,
        bucket_bytes: int = 512 << 20,
        tied_embeddings: bool = False,
    ) -> None:
        self._export = export
        self._folder = Path(folder)
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._tied = tied_embeddings
        self._buckets: tuple[Bucket, ...] | None = None
        self._published: Path | None = None
        self.version: int | None = None
        """What is published; None while it is written."""
        self._flat: list[torch.Tensor] = []

    def publish(self, version: int) -> Snapshot | None:
        """Write the weights of now as ``version``; None on ranks other than 0. Collective.
        Raises WeightSyncError: there are none.
        Raises StorageError: there is no room for them."""
        if self._buckets is None:  # the layout, which stays: a walk of its own, so that files are written in place
            self._buckets = tuple(_buckets(self._tensors(), self._bucket_bytes))
        tensors = self._tensors()
        try:
            return self._write(version, tensors) if self._rank == 0 else None
        finally:
            for _ in tensors:  # also after an error: the other ranks go on to the end
                pass

    def flat(self, index: int) -> torch.Tensor:
        """The bytes of a published bucket, uint8."""
        return self._flat[index]

    def remove(self) -> None:
        """Remove what was published."""
        self._flat, self.version = [], None
        if self._published is not None:
            shutil.rmtree(self._published, ignore_errors=True)
            self._published = None

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (pair for pair in self._export() if not (self._tied and pair[0] == "lm_head.weight"))

    def _write(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> Snapshot:
        if not self._buckets:
            raise WeightSyncError("the trainer exported no weights")
        self.remove()
        folder = self._folder / f"version-{version:06d}"
        partial = folder.with_suffix(".partial")
        for left_over in (folder, partial):
            shutil.rmtree(left_over, ignore_errors=True)
        partial.mkdir(parents=True, mode=0o700)
        digest = 0
        try:
            for number, bucket in enumerate(self._buckets):
                flat = _map(partial / f"model-{number:05d}.safetensors", bucket)
                for place, (_, tensor) in zip(_views(flat, bucket), tensors, strict=False):
                    place.copy_(tensor.detach())
                digest = hash((digest, _sum(flat)))
                self._flat.append(flat)
        except OSError as error:
            needed, free = sum(b.nbytes for b in self._buckets), shutil.disk_usage(self._folder).free
            shutil.rmtree(partial, ignore_errors=True)
            raise StorageError(
                f"version {version} of the weights cannot be published in {self._folder}: {error.strerror}. It has "
                f"{needed / 2**30:.2f} GiB, for which {free / 2**30:.2f} GiB are left. Make room (a container: more "
                "shared memory), or give --weight-snapshot-dir a folder on a disk."
            ) from error
        partial.rename(folder)
        self._published, self.version = folder, version
        return Snapshot(version, str(folder), self._buckets, digest)


def _buckets(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[Bucket]:
    """Tensors in their order, put together up to ``limit`` bytes.

    SGLang's receiver requires that each starts at a multiple of its item size; one that would not opens a new bucket.
    """
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    size = 0
    for name, tensor in tensors:
        nbytes, item = tensor.numel() * tensor.dtype.itemsize, tensor.dtype.itemsize
        if names and (size + nbytes > limit or size % item):
            yield Bucket(tuple(names), tuple(dtypes), tuple(shapes), size)
            names, dtypes, shapes, size = [], [], [], 0
        names.append(name)
        dtypes.append(str(tensor.dtype).removeprefix("torch."))
        shapes.append(tuple(tensor.shape))
        size += nbytes
    if names:
        yield Bucket(tuple(names), tuple(dtypes), tuple(shapes), size)


def _map(path: Path, bucket: Bucket) -> torch.Tensor:
    """A new safetensors file for the bucket; its data, to be filled."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        end = start + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    offset = 8 + len(text)
    with open(path, "x+b") as file:
        # All room now, as an error: a page that is missing later would end the process.
        os.posix_fallocate(file.fileno(), 0, offset + bucket.nbytes)
        data = mmap.mmap(file.fileno(), offset + bucket.nbytes)
    data[:offset] = len(text).to_bytes(8, "little") + text
    return torch.frombuffer(data, dtype=torch.uint8, offset=offset, count=bucket.nbytes)


def _views(flat: torch.Tensor, bucket: Bucket) -> Iterator[torch.Tensor]:
    offset = 0
    for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        end = offset + math.prod(shape) * kind.itemsize
        yield flat[offset:end].view(kind).view(shape)
        offset = end


def _sum(flat: torch.Tensor) -> int:
    words = flat.numel() // 8 * 8
    return int(flat[:words].view(torch.int64).sum()) + int(flat[words:].sum())
