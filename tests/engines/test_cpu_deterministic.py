"""What SGLang's deterministic mode stands on where there is no GPU: each bit from its own row alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from agentrl.engines import cpu_deterministic as deterministic
from agentrl.engines.cpu_deterministic import attend, draw, plan_invariant, tiled_mm, uniform


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("depth", "width"), [(128, 384), (64, 500), (72, 100)])
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(depth, width):
    weight, rows = torch.randn(width, depth).t(), torch.randn(70, depth)
    whole = tiled_mm(rows, weight)
    torch.testing.assert_close(whole, rows @ weight)
    for start, stop in [(0, 1), (69, 70), (3, 20), (31, 64), (5, 70)]:
        assert torch.equal(tiled_mm(rows[start:stop], weight), whole[start:stop])
    assert torch.equal(tiled_mm(rows[::3], weight), whole[::3])
    assert tiled_mm(rows[:0], weight).shape == (0, width)


class Cache:
    """Keys and values of sequences, scattered over the slots of a cache as SGLang's are."""

    def __init__(self, lengths, *, groups, heads, dim):
        total = sum(lengths)
        self.lengths, self.dim = torch.tensor(lengths), dim
        slots = torch.randperm(total) + 1
        self.requests = torch.randperm(len(lengths)) + 2
        self.table = torch.zeros(len(lengths) + 2, max(lengths) + 9, dtype=torch.int32)
        self.keys, self.values = torch.randn(total + 1, groups, dim), torch.randn(total + 1, groups, dim)
        self.queries, start = [], 0
        for request, length in zip(self.requests, lengths, strict=True):
            self.table[request, :length] = slots[start : start + length].int()
            self.queries.append(torch.randn(length, heads, dim))
            start += length

    def prompts(self, prefixes):
        """The queries after each prefix, in one batch."""
        new = [query[prefix:] for query, prefix in zip(self.queries, prefixes, strict=True)]
        plan = plan_invariant(self.table, self.requests, self.lengths, torch.tensor([len(n) for n in new]))
        query = torch.cat(new)
        return attend(query, torch.empty_like(query), self.keys, self.values, plan).split([len(n) for n in new])

    def last(self, chosen):
        """The last query of each sequence in ``chosen``, in one batch."""
        rows = torch.tensor(chosen)
        plan = plan_invariant(self.table, self.requests[rows], self.lengths[rows], torch.ones_like(rows))
        query = torch.stack([self.queries[i][-1] for i in chosen])
        return attend(query, torch.empty_like(query), self.keys, self.values, plan)


@pytest.mark.parametrize(("groups", "heads", "dim"), [(2, 4, 32), (4, 4, 16), (2, 6, 72)])
def test_a_token_gets_the_same_attention_in_a_prompt_after_a_prefix_and_alone(groups, heads, dim):
    lengths = [40, 700, 513, 512, 1]
    cache = Cache(lengths, groups=groups, heads=heads, dim=dim)
    whole = cache.prompts([0] * 5)
    for i, length in enumerate(lengths):
        slots = cache.table[cache.requests[i], :length].long()
        expected = scaled_dot_product_attention(
            cache.queries[i].transpose(0, 1)[None], cache.keys[slots].transpose(0, 1)[None],
            cache.values[slots].transpose(0, 1)[None], is_causal=True, enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(whole[i], expected[0].transpose(0, 1))
    prefixes = [39, 300, 512, 5, 0]
    for part, all_of_it, prefix in zip(cache.prompts(prefixes), whole, prefixes, strict=True):
        assert torch.equal(part, all_of_it[prefix:])
    last = torch.stack([part[-1] for part in whole])
    assert torch.equal(cache.last([0, 1, 2, 3, 4]), last)
    assert torch.equal(cache.last([3, 1]), last[[3, 1]])
    assert torch.equal(cache.last([2]), last[[2]])


def test_what_a_token_draws_follows_from_its_seed_and_position_alone():
    weights = torch.rand(1, 50).repeat(4000, 1)
    weights[:, [0, 7, 49]] = 0.0
    seeds, positions = torch.arange(4000) // 2 + 2**62, torch.arange(4000) % 2 + 10
    drawn = draw(weights, seeds, positions)
    assert drawn.shape == (4000, 1) and not set(drawn.view(-1).tolist()) & {0, 7, 49}
    assert torch.equal(draw(weights[:3], seeds[[9, 500, 77]], positions[[9, 500, 77]]), drawn[[9, 500, 77]])
    shares = torch.bincount(drawn.view(-1), minlength=50) / 4000
    torch.testing.assert_close(shares.double(), (weights[0] / weights[0].sum()).double(), atol=0.015, rtol=0)
    assert uniform(1, 2) == uniform(1, 2) != uniform(2, 1)
    numbers = [uniform(seed, 3) for seed in range(2000)]
    assert 0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1 and abs(sum(numbers) / 2000 - 0.5) < 0.03


def test_a_machine_whose_products_depend_on_the_batch_is_refused(monkeypatch):
    def position_dependent(a, b, *, out):
        out.copy_(a @ b)
        out[0] += 1e-3

    monkeypatch.setattr(deterministic.torch, "mm", position_dependent)
    with pytest.raises(RuntimeError, match="product_is_invariant does not hold on this machine for \\(40, 41"):
        tiled_mm(torch.ones(2, 40), torch.ones(40, 41))
