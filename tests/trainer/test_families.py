"""Every family of models against transformers: log-probabilities, and weights there and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.trainer.samples import log_probs, random_batch, tiny_checkpoint, train

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
MODELS = {
    "qwen3 tied": ("qwen3", {}),
    "qwen3 untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3 rope base": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2 tied": ("qwen2", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama 3 rope, tied": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", {}),
    "glm4": ("glm4", {"tie_word_embeddings": False}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen2_moe": ("qwen2_moe", {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"tie_word_embeddings": False}),
    "glm4_moe": ("glm4_moe", {"tie_word_embeddings": False}),
    "deepseek_v3": ("deepseek_v3", {"tie_word_embeddings": False}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {"tie_word_embeddings": False, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3 as Moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}  # fmt: skip


def hf_log_probs(path, batch, temperature):
    """float32 log-probabilities of the sampled tokens, each sequence alone, in order."""
    model, out = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    cuts = np.cumsum(batch.lengths)[:-1]
    for tokens, mask in zip(np.split(batch.tokens, cuts), np.split(batch.loss_mask, cuts), strict=True):
        ids, at = torch.from_numpy(tokens).long(), torch.from_numpy(np.flatnonzero(mask))
        with torch.no_grad():
            table = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
        out.append(table[at - 1, ids[at]])
    return torch.cat(out).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_equal_transformers_and_export_is_bit_exact(make_trainer, tmp_path, name):
    kind, changes = MODELS[name]
    path = tiny_checkpoint(tmp_path / "model", kind, **changes)
    trainer, batch = make_trainer(path, rollout_temperature=0.8), random_batch(6)
    ours = log_probs(trainer, batch)
    assert np.abs(ours[batch.loss_mask == 1] - hf_log_probs(path, batch, 0.8)).max() < 1e-4
    assert (ours[batch.loss_mask == 0] == 0).all()
    there, exported = load_file(tmp_path / "model" / "model.safetensors"), dict(trainer.export())
    assert exported.keys() == there.keys()
    assert all(torch.equal(exported[n], t) for n, t in there.items())


def test_layers_that_predict_further_tokens_are_kept_as_they_are(make_trainer, tmp_path):
    """GLM-4.5 and DeepSeek-V3 have such layers behind the last; only speculative decoding uses them."""
    path = Path(tiny_checkpoint(tmp_path / "model", "glm4_moe", tie_word_embeddings=False, num_hidden_layers=2))
    weights = load_file(path / "model.safetensors")
    further = {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "model.layers.2.mlp.up_proj.weight": torch.ones(2)}
    save_file(weights | further, path / "model.safetensors", metadata={"format": "pt"})
    trainer = make_trainer(str(path))
    assert not further.keys() & dict(trainer.export()).keys()
    trainer.save_hf(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == weights.keys() | further.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in further.items())


def test_kimi_k2_is_read_as_deepseek_v3(make_trainer, tmp_path):
    path = Path(tiny_checkpoint(tmp_path / "model", "deepseek_v3", n_group=1, topk_group=1, num_hidden_layers=2))
    batch, config = random_batch(2), json.loads((path / "config.json").read_text())
    expected = log_probs(make_trainer(str(path)), batch)
    (path / "config.json").write_text(
        json.dumps({**config, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "a.b"}})
    )
    assert np.array_equal(log_probs(make_trainer(str(path)), batch), expected)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_the_reference_of_a_mixture_is_the_checkpoint_it_started_from(make_trainer, tmp_path, kind):
    path = tiny_checkpoint(tmp_path / "model", kind, num_hidden_layers=2)
    trainer, batch = make_trainer(path, use_kl_loss=True, kl_loss_coef=0.1), random_batch(4)
    before = log_probs(trainer, batch)
    train(trainer, batch)
    assert np.array_equal(log_probs(trainer, batch, "ref"), before)
    assert np.abs(log_probs(trainer, batch) - before).max() > 1e-4
