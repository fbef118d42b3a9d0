"""GLM-4.5, 4.6 and 4.7: half of each head rotated, DeepSeek-V3's routing, the first layers dense."""

from agentrl.families.family import DENSE, Model, Settings, dense, sigmoid_routed


def settings(model: Model) -> Settings:
    return dense(model, add_qkv_bias=model.get("attention_bias"), qk_layernorm=bool(model.get("use_qk_norm")))


FAMILY = sigmoid_routed(settings, DENSE, "attention_bias partial_rotary_factor use_qk_norm")
