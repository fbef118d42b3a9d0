"""Attention on the CPU gives what SGLang's own gives, whatever is batched with what."""

import pytest
import torch

from agentrl.engines import cpu_attention, cpu_backend
from agentrl.engines.cpu_attention import BatchedAttention, buckets, plan_batched

LENGTHS = [1, 40, 41, 700, 513, 9, 300, 300, 2, 45]


@pytest.fixture(scope="module")
def backend():
    """SGLang's class; its own methods are the reference."""
    cpu_backend.install()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend


@pytest.fixture
def batched(backend, monkeypatch):
    """An engine's attention, without the engine around it."""
    monkeypatch.setattr(backend, "init_forward_metadata", lambda self, forward_batch: None)
    made = object.__new__(type("Batched", (BatchedAttention, backend), {}))
    made.init_forward_metadata(None)
    return made


class Batch:
    """Sequences scattered over the slots of a cache, and the queries of the tokens after each prefix."""

    def __init__(self, lengths, prefixes, *, groups=2, heads=4, dim=32, value_dim=None, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        total, value_dim = sum(lengths), value_dim or dim
        made = {"dtype": dtype, "generator": generator}
        self.lengths, self.prefixes = torch.tensor(lengths), torch.tensor(prefixes)
        self.new = self.lengths - self.prefixes
        self.requests = torch.randperm(len(lengths), generator=generator) + 2
        self.table = torch.randint(0, total, (len(lengths) + 2, max(lengths) + 9), generator=generator).int()
        slots = torch.randperm(total, generator=generator).int()
        for request, own in zip(self.requests, slots.split(lengths), strict=True):
            self.table[request, : len(own)] = own
        self.keys, self.values = torch.randn(total, groups, dim, **made), torch.randn(total, groups, value_dim, **made)
        self.query = torch.randn(int(self.new.sum()), heads, dim, **made)
        self.gqa = heads != groups

    def extend(self, attention, **options):
        """All new tokens of each sequence, as SGLang calls it for a layer."""
        output = torch.full((*self.query.shape[:2], self.values.shape[2]), torch.nan, dtype=self.query.dtype)
        given = {"scaling": 0.3, "enable_gqa": self.gqa, "causal": True, "is_cross_attn": False} | options
        encoder = given.pop("encoder_lens", None)
        return attention._run_sdpa_forward_extend(
            self.query, output, self.keys, self.values, self.table, self.requests, self.lengths, self.prefixes,
            self.new, encoder, **given,
        )  # fmt: skip

    def decode(self, attention, **options):
        """The last token of each sequence."""
        query = self.query[self.new.cumsum(0) - 1]
        output = torch.full((*query.shape[:2], self.values.shape[2]), torch.nan, dtype=query.dtype)
        given = {"scaling": 0.3, "enable_gqa": self.gqa, "causal": False, "is_cross_attn": False} | options
        return attention._run_sdpa_forward_decode(
            query, output, self.keys, self.values, self.table, self.requests, self.lengths,
            given.pop("encoder_lens", None), **given,
        )  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 2, "heads": 4},
        {"groups": 4, "heads": 4, "dim": 16},
        {"groups": 3, "heads": 9, "dim": 64},
        {"groups": 1, "heads": 6, "dim": 24, "value_dim": 16},
        {"dtype": torch.bfloat16},
    ],
)
@pytest.mark.parametrize("prefixes", [[0] * 10, [0, 39, 5, 300, 512, 0, 299, 0, 1, 44]])
def test_prompts_and_answers_get_what_sglang_computes_one_by_one(backend, batched, shape, prefixes, monkeypatch):
    batch, own = Batch(LENGTHS, prefixes, **shape), object.__new__(backend)
    monkeypatch.setattr(cpu_attention, "PLAN_BYTES", 100_000)  # some masks are kept, some are not
    close = {"atol": 5e-6, "rtol": 1e-5} if batch.query.dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for layer in range(2):  # the plan of the first is the plan of the second
        torch.testing.assert_close(batch.extend(batched), batch.extend(own), **close, msg=f"layer {layer}")
    assert len(batched._plan) < 10 + 3
    batched.init_forward_metadata(None)
    torch.testing.assert_close(batch.decode(batched), batch.decode(own), **close)
    assert sum(part.rows.numel() for part in batched._plan) == 10


@pytest.mark.parametrize(
    "other",
    [{"sliding_window_size": 8}, {"encoder_lens": torch.zeros(10, dtype=torch.long)}, {"causal": False}],
)
def test_other_attention_is_left_to_sglang(backend, batched, other):
    batch, own = Batch(LENGTHS, [0] * 10), object.__new__(backend)
    torch.testing.assert_close(batch.extend(batched, **other), batch.extend(own, **other), rtol=0, atol=0)
    torch.testing.assert_close(batch.decode(batched), batch.decode(own))  # a layer of the usual kind among them
    torch.testing.assert_close(
        batch.decode(batched, **{**other, "causal": False}), batch.decode(own, **{**other, "causal": False})
    )


def test_a_cache_in_another_precision_is_left_to_sglang(backend, batched):
    batch, own = Batch(LENGTHS, [0] * 10), object.__new__(backend)
    batch.keys, batch.values = batch.keys.bfloat16(), batch.values.bfloat16()
    torch.testing.assert_close(batch.extend(batched), batch.extend(own), rtol=0, atol=0)
    assert batched._plan is None


def test_a_call_is_saved_where_padding_costs_less():
    def shapes(lengths, new):
        table, requests = torch.zeros(len(lengths), 2048, dtype=torch.int32), torch.arange(len(lengths))
        plan = plan_batched(table, requests, torch.tensor(lengths), torch.tensor(new), 512)
        return [(*part.rows.shape, part.slots.shape[1]) for part in plan]

    assert shapes([10] * 60 + [2000] * 4, [1] * 64) == [(60, 1, 10), (4, 1, 2000)]
    assert shapes(list(range(100, 164)), [1] * 64) == [(64, 1, 163)]
    assert shapes([30, 33, 31, 600], [30, 3, 31, 600]) == [(3, 31, 33), (1, 88, 600), (1, 256, 256), (1, 256, 512)]


def test_memory_of_a_call_is_bounded(monkeypatch):
    monkeypatch.setattr(cpu_attention, "PART_BYTES", 1 << 20)
    for tokens, most in ((1, 1), (1, 8), (200, 3)):
        pieces = [(tokens, 2000 // most, i, i) for i in range(64)]
        found = list(buckets(pieces, 512))
        assert sorted(piece for bucket in found for piece in bucket) == pieces
        for bucket in found:
            assert len(bucket) == 1 or len(bucket) * bucket[0][1] * (512 + 4 * tokens) <= 1 << 20
