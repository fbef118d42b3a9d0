"""Further sets of weights for one model."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.reference import WeightCopies


def test_weights_are_swapped_in_and_back_also_after_an_error() -> None:
    model = torch.nn.Linear(2, 2)
    first = model.weight.detach().clone()
    copies = WeightCopies(model)
    copies.keep("ref")
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(KeyError, match="stop"), copies.use("ref"):
        assert torch.equal(model.weight, first)
        raise KeyError("stop")
    assert torch.equal(model.weight, first + 1)
    copies.keep("ref")
    with torch.no_grad():
        model.weight.add_(1)
    with copies.use("ref"):
        assert torch.equal(model.weight, first + 1)
    assert torch.equal(model.weight, first + 2)


def test_a_swap_takes_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = WeightCopies(torch.nn.Linear(2, 2))
    copies.keep("ref")
    with copies.use("ref"):
        pass
    monkeypatch.setattr(torch, "empty_like", None)
    copies.keep("ref")
    with copies.use("ref"):
        pass
