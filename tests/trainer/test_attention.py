"""Packed attention: each sequence as if it were alone."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.megatron.attention import varlen_attention


def alone(query, key, value):
    """Causal attention of one sequence in float64, written out."""
    times = query.shape[1] // key.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("lengths", [(7,), (5, 5, 5), (1, 3, 3, 40), (64, 64, 9)])
def test_equals_each_sequence_alone_with_gradients(groups, lengths):
    torch.manual_seed(0)
    total = sum(lengths)
    shapes = [(total, 4, 16), (total, groups, 16), (total, groups, 16)]
    packed = [torch.randn(s, requires_grad=True) for s in shapes]
    single = [x.detach().clone().requires_grad_() for x in packed]
    weights = torch.randn(total, 4, 16)
    out = varlen_attention(*packed, lengths)
    expected = torch.cat([alone(*parts) for parts in zip(*(x.split(lengths) for x in single), strict=True)])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(packed, single, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)
