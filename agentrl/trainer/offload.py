"""Device memory of a model in training, given back between its turns (``--offload-train``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Moved:
    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None
    """Of its bytes, in host memory; None where they were dropped."""


class Offload:
    """Moves storages to host memory and back. Tensors and their views stay what they are: optimizers, gradient buffers
    and hooks hold on to these very objects.

    A storage is resized to nothing, so its address changes. Copies of a GPU's memory are pinned, and their room is kept
    for the next time. On the CPU a copy is only a move, and what is dropped is freed.
    """

    def __init__(self) -> None:
        self._moved: list[_Moved] = []
        self._room: dict[int, Tensor] = {}

    @torch.no_grad()
    def release(self, device: torch.device, *, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> int:
        """Give the memory of these tensors back, on ``device``; those ``dropped`` come back with any content.

        Returns:
            Bytes that were given back; 0 where they already were.
        """
        if self._moved:
            return 0
        room: dict[int, Tensor] = {}
        for tensors, keep in ((dropped, False), (kept, True)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                # Views of what is gone by now have nothing left; a scalar may be in host memory.
                if tensor.device.type != device.type or not storage.nbytes() or not storage.resizable():
                    continue
                moved = _Moved(storage, storage.nbytes(), None)
                if keep:
                    moved.copy = self._room.get(storage._cdata)
                    if moved.copy is None or moved.copy.numel() != moved.nbytes:
                        moved.copy = torch.empty(moved.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
                    moved.copy.copy_(_bytes(storage))
                    if device.type == "cuda":
                        room[storage._cdata] = moved.copy
                storage.resize_(0)
                self._moved.append(moved)
        self._room = room
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(moved.nbytes for moved in self._moved)

    @torch.no_grad()
    def resume(self) -> None:
        """Have it again, if it was given back."""
        while self._moved:
            moved = self._moved.pop()
            moved.storage.resize_(moved.nbytes)
            if moved.copy is not None:
                _bytes(moved.storage).copy_(moved.copy, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
