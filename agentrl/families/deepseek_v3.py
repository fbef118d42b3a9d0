"""DeepSeek-V3, V3.1 and R1, Moonlight, Kimi K2: latent attention (MLA), sigmoid routing within groups of experts."""

from agentrl.families.family import LATENT_ATTENTION, MLP, NORMS, Model, Settings, dense, rope, sigmoid_routed


def settings(model: Model) -> Settings:
    nope, rotated = model.get("qk_nope_head_dim") or 0, model.get("qk_rope_head_dim") or 0
    parameters = rope(model)
    return dense(
        model,
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=model.get("q_lora_rank"),
        kv_lora_rank=model.get("kv_lora_rank"),
        qk_head_dim=nope,
        qk_pos_emb_head_dim=rotated,
        v_head_dim=model.get("v_head_dim"),
        kv_channels=nope + rotated,
        # Of these Megatron makes the scale of the scores; the frequencies are transformers'.
        rope_type="yarn" if parameters["rope_type"] == "yarn" else "rope",
        rotary_scaling_factor=parameters.get("factor") or 1.0,
        mscale_all_dim=parameters.get("mscale_all_dim") or 0.0,
    )


FAMILY = sigmoid_routed(
    settings,
    {**NORMS, **LATENT_ATTENTION, **MLP},
    "kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim qk_nope_head_dim qk_head_dim",
    rope_interleave=True,
    moe_layer_freq=1,
)
