"""DeepSeek-V3, V3.1 and R1, Moonlight, Kimi K2: latent attention (MLA), sigmoid routing within groups of experts."""

from agentrl.families.family import (
    EXPERTS,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    SIGMOID_ROUTING,
    SIGMOID_ROUTING_ONLY,
    Family,
    Model,
    Settings,
    dense,
    experts,
    first_layers,
    rope,
    shared_experts,
    sigmoid_routing,
    sigmoid_routing_wrong,
    words,
)


def settings(model: Model) -> Settings:
    nope, rotated = model.get("qk_nope_head_dim") or 0, model.get("qk_rope_head_dim") or 0
    parameters = rope(model)
    return (
        dense(
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
        | experts(model, dense_layers=first_layers(model), norm=True)
        | sigmoid_routing(model)
    )


FAMILY = Family(
    settings,
    {**NORMS, **LATENT_ATTENTION, **MLP, **EXPERTS, **shared_experts("shared_experts")},
    fields=SIGMOID_ROUTING
    | words("kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim qk_nope_head_dim qk_head_dim"),
    only={**SIGMOID_ROUTING_ONLY, "rope_interleave": True, "moe_layer_freq": 1},
    wrong=sigmoid_routing_wrong,
)
