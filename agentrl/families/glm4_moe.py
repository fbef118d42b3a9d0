"""GLM-4.5, 4.6 and 4.7: half of each head rotated, DeepSeek-V3's routing, the first layers dense."""

from agentrl.families.family import (
    SIGMOID_ROUTING,
    SIGMOID_ROUTING_ONLY,
    SPARSE,
    Family,
    Model,
    Settings,
    dense,
    experts,
    first_layers,
    shared_experts,
    sigmoid_routing,
    sigmoid_routing_wrong,
    words,
)


def settings(model: Model) -> Settings:
    return (
        dense(model, add_qkv_bias=model.get("attention_bias"), qk_layernorm=bool(model.get("use_qk_norm")))
        | experts(model, dense_layers=first_layers(model), norm=True)
        | sigmoid_routing(model)
    )


FAMILY = Family(
    settings,
    {**SPARSE, **shared_experts("shared_experts")},
    fields=SIGMOID_ROUTING | words("attention_bias partial_rotary_factor use_qk_norm"),
    only=SIGMOID_ROUTING_ONLY,
    wrong=sigmoid_routing_wrong,
)
