"""Every family of models against transformers: log-probabilities, and weights there and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from agentrl.data.writes import Writes
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


def test_the_biases_of_a_references_routers_are_its_own_after_a_resume_too(make_trainer, tmp_path):
    path, other = (tiny_checkpoint(tmp_path / name, "deepseek_v3", num_hidden_layers=2) for name in ("model", "other"))
    tensors = load_file(f"{other}/model.safetensors")
    (bias,) = [name for name in tensors if name.endswith("e_score_correction_bias")]
    save_file({**tensors, bias: tensors[bias].flip(0)}, f"{other}/model.safetensors", {"format": "pt"})
    options = {"use_kl_loss": True, "ref_load": other, "ref_update_interval": 9}
    trainer, batch = make_trainer(path, **options), random_batch(4)
    live, reference = log_probs(trainer, batch), log_probs(trainer, batch, "ref")
    assert (live != reference).any()
    trainer.save(tmp_path / "state")
    trainer = make_trainer(path, **options)
    trainer.load(tmp_path / "state")
    assert np.array_equal(log_probs(trainer, batch, "ref"), reference)
    assert np.array_equal(log_probs(trainer, batch), live)


@pytest.mark.parametrize("kind", ["glm4", "qwen2_moe"])
def test_the_parts_of_tensor_parallel_ranks_make_the_whole(make_trainer, tmp_path, kind):
    core = make_trainer(tiny_checkpoint(tmp_path / "model", kind, num_hidden_layers=1)).policy.core
    from agentrl.trainer.megatron.conversion import is_split

    ranks = [replace(core.conversion, layout=replace(core.layout, tp=2, tp_rank=rank)) for rank in range(2)]
    split = 0
    for name, whole in core.conversion.tensors(core.model).items():
        parts = [conversion.split(name, whole, like=whole) for conversion in ranks]
        if is_split(whole):
            assert all(part.numel() * 2 == whole.numel() for part in parts), name
            assert torch.equal(ranks[0].merge(name, parts, vars(whole)["partition_dim"]), whole)
            split += 1
        else:
            assert all(part is whole for part in parts), name
    assert split >= 5


def test_experts_that_are_spread_over_ranks_have_their_numbers_in_the_whole_model(make_trainer, tmp_path):
    core = make_trainer(tiny_checkpoint(tmp_path / "model", "mixtral", num_hidden_layers=1)).policy.core
    second = replace(core.conversion, layout=replace(core.layout, ep=2, ep_rank=1))
    experts = "decoder.layers.0.mlp.experts."
    assert second.name(core.model, experts + "local_experts.1.linear_fc1.weight") == experts + "3.linear_fc1.weight"
    assert second.name(core.model, experts + "linear_fc2.weight0") == experts + "2.linear_fc2.weight"
    assert second.spread(experts + "2.linear_fc2.weight") and not second.spread("decoder.layers.0.mlp.router.weight")


def test_a_stage_whose_layers_are_all_dense_has_a_state_that_loads(make_trainer, tmp_path):
    core = make_trainer(tiny_checkpoint(tmp_path / "model", "glm4_moe", num_hidden_layers=1)).policy.core
    from agentrl.trainer.megatron.state import _SavedTensors

    state = core._state
    # One process, as the one that writes of a layout whose experts are spread.
    state._layout = replace(core.layout, ep=2)
    state._conversion = replace(core.conversion, layout=state._layout)
    state.save(tmp_path / "state", {}, Writes())
    shutil.copy(tmp_path / "state/experts-ep0-pp0.safetensors", tmp_path / "state/experts-ep1-pp0.safetensors")
    saved = _SavedTensors(tmp_path / "state", {"tp": 1, "pp": 1, "ep": 2}, core.conversion)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    parameter = core.conversion.tensors(core.model)[name]
    assert torch.equal(saved.local("weight", name, parameter), parameter)


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_a_mixture_resumes_bit_exactly_and_may_recompute_its_activations(make_trainer, tmp_path, kind):
    path, batches = (
        tiny_checkpoint(tmp_path / "model", kind, num_hidden_layers=2),
        [random_batch(4, seed=n) for n in (1, 2)],
    )
    trainer = make_trainer(path, dtype="bf16", use_distributed_optimizer=True)
    train(trainer, batches[0])
    trainer.save(tmp_path / "state")
    expected, weights = train(trainer, batches[1]), {n: t.clone() for n, t in trainer.export()}
    assert expected["train/grad_norm"] > 0
    for options in ({}, {"recompute_activations": True}):
        trainer = make_trainer(path, dtype="bf16", use_distributed_optimizer=True, **options)
        trainer.load(tmp_path / "state")
        assert train(trainer, batches[1])["train/grad_norm"] == expected["train/grad_norm"]
        assert all(torch.equal(weights[n], t) for n, t in trainer.export())
