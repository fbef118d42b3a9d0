"""What a config.json may ask for."""

import json

import pytest

from agentrl import families
from agentrl.config.presets import demo_folder
from agentrl.families.fields import known, not_computed

QWEN = {
    "model_type": "qwen3", "num_hidden_layers": 4, "max_position_embeddings": 4096, "sliding_window": 512,
    "use_sliding_window": False, "max_window_layers": 4,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "max_position_embeddings": 4096}
MISTRAL = {**LLAMA, "model_type": "mistral"}
DEEPSEEK = {
    "model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be trained; supported: qwen2, qwen3, llama"),
        ({**LLAMA, "attention_bias": True}, "attention_bias True"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias True"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 2}, "sliding_window 512 is in force"),
        ({**QWEN, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window 512 is in force"),
        # In a mixture max_window_layers is no first layer.
        ({**QWEN, "model_type": "qwen3_moe", "use_sliding_window": True}, "sliding_window 512 is in force"),
        ({**QWEN, "model_type": "qwen2_moe", "use_sliding_window": True}, "sliding_window 512 is in force"),
        ({**LLAMA, "sliding_window": 1024}, "sliding_window 1024 is in force"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 8}}, "beta_fast 8 of the rotary"),
        (
            {**QWEN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5}},
            "attention_factor 0.5",
        ),
        ({**QWEN, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type 'mrope'"),
        ({**QWEN, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ between layers"),
        ({**QWEN, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({**QWEN, "num_experts": 8}, "8 experts are not computed"),
        ({**LLAMA, "sparsity_of_attention": 0.5}, "sparsity_of_attention 0.5 is not known here"),
        ({**MISTRAL, "sliding_window": 1024}, "sliding_window 1024 is in force"),
        ({"model_type": "glm4", "mlp_bias": True}, "mlp_bias True"),
        ({"model_type": "glm4_moe", "norm_topk_prob": False}, "norm_topk_prob False"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({**DEEPSEEK, "topk_method": "greedy"}, "topk_method 'greedy'"),
        ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave False"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias True"),
        ({**DEEPSEEK, "topk_group": 2}, "num_experts_per_tok 8 with topk_group 2"),
    ],
)
def test_what_is_not_computed_is_named(model, text):
    (problem,) = not_computed(model)
    assert text in problem


@pytest.mark.parametrize(
    "model",
    [
        QWEN,
        {**QWEN, "use_sliding_window": True},  # from layer 4 on, of which there is none
        {**QWEN, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 4096},
        {**LLAMA, "hidden_act": "silu", "mlp_bias": False, "attention_bias": None, "partial_rotary_factor": 1.0},
        {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {**LLAMA, "_name": "of a tool", "new_and_off": False, "use_cache": True, "transformers_version": "5"},
        {**MISTRAL, "sliding_window": None},
        {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
        {  # as SmolLM2 was published
            **LLAMA, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 1, "hidden_act": "silu", "initializer_range": 0.04, "is_llama_config": True,
            "mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False, "rope_scaling": None,
            "rope_theta": 100000, "torch_dtype": "bfloat16", "transformers.js_config": {"dtype": "q4"},
            "use_cache": True,
        },
        DEEPSEEK,
        {**DEEPSEEK, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "auto_map": {"AutoConfig": "x"}},
        {},  # the trainer looks again, with transformers' defaults
    ],
)  # fmt: skip
def test_what_is_computed_passes(model):
    assert list(not_computed(model)) == []


def test_the_embedded_model_passes():
    assert list(not_computed(json.loads((demo_folder() / "config.json").read_text()))) == []


@pytest.mark.parametrize("kind", families.MODULES)
def test_every_field_of_transformers_is_looked_at(kind):
    """A new version of transformers with a new field fails here before it trains another model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = CONFIG_MAPPING[families.MODULES[kind]]().to_dict().keys() | {"head_dim", "rope_scaling"}
    assert {name for name in fields if not name.startswith("_")} <= known(kind)


def test_the_order_of_experts_dense_layers_and_positions_is_read():
    qwen = families.family("qwen3_moe").settings({"num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert qwen["moe_layer_freq"] == [0, 1, 0, 1]
    glm = families.family("glm4_moe").settings({"num_hidden_layers": 4, "first_k_dense_replace": 3})
    assert glm["moe_layer_freq"] == [0, 0, 0, 1]
    smol = families.family("smollm3").settings({"num_hidden_layers": 8})
    assert smol["no_rope_freq"] == [0, 0, 0, 1, 0, 0, 0, 1]
