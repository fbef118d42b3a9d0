"""GLM-4-0414 and GLM-Z1: norms on both sides of attention and MLP, neighbours of half a head rotated together."""

from agentrl.families.family import DENSE, Family, Model, Settings, dense, gate_up, plain, words


def settings(model: Model) -> Settings:
    return dense(model, add_qkv_bias=model.get("attention_bias"), rotary_interleaved=True)


FAMILY = Family(
    settings,
    {
        **DENSE,
        "mlp.linear_fc1.weight": gate_up("mlp.gate_up_proj.weight"),
        # Others give the layer itself these norms, and so Megatron's checkpoints call them.
        "post_self_attn_layernorm.weight": plain("post_self_attn_layernorm.weight"),
        "post_mlp_layernorm.weight": plain("post_mlp_layernorm.weight"),
        "self_attention.linear_proj.output_norm.weight": plain("post_self_attn_layernorm.weight"),
        "mlp.linear_fc2.output_norm.weight": plain("post_mlp_layernorm.weight"),
    },
    fields=words("attention_bias partial_rotary_factor"),
    output_norms=True,
)
