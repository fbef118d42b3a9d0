"""Operations of a model, against those that torch counts while transformers runs it."""

from __future__ import annotations

import pytest

from agentrl.families.flops import Flops
from tests.trainer.samples import MIXTURES

KINDS = ["qwen2", "qwen3", "llama", "glm4", *MIXTURES]


def counted(config, tokens: int) -> int:
    """Of transformers' model, whose plain attention computes all pairs, those to come included."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, tokens, dtype=torch.int64))
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_that_torch_counts(kind):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = dict(
        vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config = CONFIG_MAPPING[kind](**{**sizes, **MIXTURES.get(kind, {})})
    flops = Flops.of(config.to_dict())
    for tokens in (5, 16):
        rotary = counted(config, tokens) - flops.token * tokens - flops.pair * tokens**2 - flops.logits * tokens
        assert 0 <= rotary <= 2 * tokens * 64, "but for the angles of the rotary embedding"


def test_the_quadratic_part_is_of_the_tokens_before():
    flops = Flops(token=10, pair=2, logits=100)
    assert flops.sequence(1) == 12 and flops.sequence(4, 3) == 40 + 20 + 300


def test_a_large_model_is_counted_from_its_config():
    """Qwen3-0.6B: 440 million parameters in its layers."""
    model = {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    flops = Flops.of(model)
    assert flops.token == 2 * 28 * 1024 * (2 * 128 * (16 + 8) + 3 * 3072) == pytest.approx(2 * 440e6, rel=1e-2)
