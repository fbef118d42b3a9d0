"""Further sets of weights for one model: the reference policy, kept on the CPU and swapped in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class WeightCopies:
    """Named CPU copies of a model's parameters, and of the biases by which its experts are chosen.

    One copy costs the size of this rank's weights in CPU memory, and nothing on the GPU. While one
    is swapped in, the live weights wait in CPU memory too.
    """

    def __init__(self, model: torch.nn.Module):
        biases = (value for name, value in model.named_buffers() if name.endswith(".expert_bias"))
        self._parameters = [*model.parameters(), *biases]
        self._copies: dict[str, list[torch.Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def keep(self, name: str) -> None:
        """Copy the model's present weights under this name, in place of an earlier copy."""
        self._copies[name] = [p.detach().to("cpu", copy=True) for p in self._parameters]

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Run a block with the weights of that name, then put the live ones back.

        Raises:
            KeyError: no copy of that name was kept.
        """
        copy, live = self._copies[name], [p.detach().to("cpu", copy=True) for p in self._parameters]
        try:
            self._write(copy)
            yield
        finally:
            self._write(live)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        # In place: gradient buffers and optimizers hold on to these very tensors.
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
