"""What a config.json may ask for."""

import json

import pytest

from agentrl.config.architecture import not_computed
from agentrl.config.presets import demo_folder

QWEN = {
    "model_type": "qwen3", "num_hidden_layers": 4, "max_position_embeddings": 4096, "sliding_window": 512,
    "use_sliding_window": False, "max_window_layers": 4,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be trained; supported: qwen2, qwen3, llama"),
        ({**LLAMA, "attention_bias": True}, "attention_bias True"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias True"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 2}, "sliding_window 512 is in force"),
        ({**QWEN, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window 512 is in force"),
        ({**LLAMA, "sliding_window": 1024}, "sliding_window 1024 is in force"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({**QWEN, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type 'mrope'"),
        ({**QWEN, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ between layers"),
        ({**QWEN, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({**QWEN, "num_experts": 8}, "num_experts 8"),
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
        {},  # the trainer looks again, with transformers' defaults
    ],
)
def test_what_is_computed_passes(model):
    assert list(not_computed(model)) == []


def test_the_embedded_model_passes():
    assert list(not_computed(json.loads((demo_folder() / "config.json").read_text()))) == []


def test_it_is_refused_before_anything_starts(refused, model):
    file = f"{model}/config.json"
    with open(file) as f:
        config = json.load(f)
    with open(file, "w") as f:
        json.dump({**config, "model_type": "llama", "mlp_bias": True, "hidden_act": "gelu"}, f)
    message = refused()
    assert len(message.splitlines()) == 2
    assert f"--hf-checkpoint {model}: in config.json, hidden_act 'gelu' is not computed" in message
