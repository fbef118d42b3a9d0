"""The reference policy's weights."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.reference import Reference


def test_weights_are_swapped_in_and_back_also_after_an_error() -> None:
    model = torch.nn.Linear(2, 2)
    first = model.weight.detach().clone()
    reference = Reference(model)
    reference.keep()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(KeyError, match="stop"), reference.use():
        assert torch.equal(model.weight, first)
        raise KeyError("stop")
    assert torch.equal(model.weight, first + 1)
    reference.keep()
    with torch.no_grad():
        model.weight.add_(1)
    with reference.use():
        assert torch.equal(model.weight, first + 1)
    assert torch.equal(model.weight, first + 1 + 1)


def test_a_swap_takes_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(torch.nn.Linear(2, 2))
    reference.keep()
    with reference.use():
        pass
    monkeypatch.setattr(torch, "empty_like", None)
    reference.keep()
    with reference.use():
        pass
