"""Packed attention: each sequence as if it were alone."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.megatron import attention
from agentrl.trainer.megatron.attention import takes_flash, varlen_attention


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


def test_the_kernel_of_gpus_is_asked_for_the_same(monkeypatch):
    """There is none here: its place is taken by each sequence alone, read from what the kernel is given."""
    from torch.nn.attention import varlen

    def kernel(query, key, value, starts, same, longest, longest_too, *, scale, window_size, enable_gqa):
        assert starts is same and starts.dtype is torch.int32 and (longest, longest_too) == (40, 40)
        assert window_size == (-1, 0) and enable_gqa and scale is None
        cuts = starts.diff().tolist()
        parts = zip(*(x.split(cuts) for x in (query, key, value)), strict=True)
        return torch.cat([alone(*each) for each in parts])

    torch.manual_seed(0)
    lengths = (1, 3, 3, 40)
    query, key, value = torch.randn(47, 4, 16), torch.randn(47, 2, 16), torch.randn(47, 2, 12)
    expected = varlen_attention(query, key, value, lengths)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "takes_flash", lambda query: True)
    out = varlen_attention(query, key, value, lengths)
    torch.testing.assert_close(out.float(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not attention._knows_groups(), reason="this torch's kernel knows no groups of queries")
def test_the_kernel_of_gpus_takes_what_it_is_given_and_has_gradients():
    """Torch's own function, on tensors without data."""
    parts = [torch.empty(12, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (8, 2, 2)]
    out = attention.flash_attention(*parts, (5, 7), 0.1)
    assert out.shape == (12, 8, 64)
    out.sum().backward()
    assert [x.grad.shape for x in parts] == [x.shape for x in parts]
    assert not takes_flash(parts[0])
