"""What is answered for the CPU reaches Megatron's modules and nobody else."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.megatron import cpu


@pytest.fixture(autouse=True)
def _installed():
    cpu.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is replaced")
def test_megatron_sees_the_cpu_where_it_asks_for_cuda():
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch.zeros([2], device="cuda").device.type == "cpu"
    assert schedules.torch.cuda.current_device() == torch.device("cpu")
    assert schedules.torch.Tensor is torch.Tensor
    assert schedules.torch.distributed is torch.distributed
    assert schedules.torch.cuda.is_available() is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is replaced")
def test_everybody_else_sees_torch_as_it_is():
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_it_stands_aside_when_cuda_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.install() is False
