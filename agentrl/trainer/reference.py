"""The reference policy: a further set of weights for one model, kept on the CPU and swapped in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Reference:
    """A CPU copy of a model's parameters, and of the biases by which its experts are chosen.

    It costs the size of this rank's weights in CPU memory, and nothing on the GPU. While it is swapped in, the live
    weights wait in CPU memory too, in room that is kept for them from then on. Of a GPU's weights all of it is pinned:
    they move at the speed of the bus.
    """

    def __init__(self, model: torch.nn.Module):
        biases = (value for name, value in model.named_buffers() if name.endswith(".expert_bias"))
        self._parameters = [*model.parameters(), *biases]
        self._kept: list[torch.Tensor] = []
        self._live: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        """Whether weights are kept."""
        return bool(self._kept)

    def keep(self) -> None:
        """Copy the model's present weights, in place of an earlier copy."""
        self._kept = self._read(self._kept)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Run a block with the weights that were kept, then put the live ones back."""
        self._live = self._read(self._live)
        try:
            self._write(self._kept)
            yield
        finally:
            self._write(self._live)

    @torch.no_grad()
    def _read(self, room: list[torch.Tensor]) -> list[torch.Tensor]:
        """The present weights in ``room``, or in new room where there is none."""
        room = room or [torch.empty_like(p, device="cpu", pin_memory=p.is_cuda) for p in self._parameters]
        for value, parameter in zip(room, self._parameters, strict=True):
            # Not waited for: whatever reads it next is of the same stream.
            value.copy_(parameter, non_blocking=True)
        return room

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        # In place: gradient buffers and optimizers hold on to these very tensors.
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value, non_blocking=True)
