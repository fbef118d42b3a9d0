"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one that sees every token through a gate."""

from agentrl.families.family import (
    SPARSE,
    Family,
    Model,
    Settings,
    dense,
    experts,
    plain,
    shared_experts,
    sparse_steps,
    words,
)


def settings(model: Model) -> Settings:
    return dense(model, add_qkv_bias=model.get("qkv_bias", True)) | experts(
        model,
        dense_layers=sparse_steps(model),
        norm=bool(model.get("norm_topk_prob")),
        moe_shared_expert_intermediate_size=model.get("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


FAMILY = Family(
    settings,
    {
        **SPARSE,
        **shared_experts("shared_expert"),
        "mlp.shared_experts.gate_weight": plain("mlp.shared_expert_gate.weight"),
    },
    fields=words(
        "qkv_bias decoder_sparse_step mlp_only_layers moe_intermediate_size shared_expert_intermediate_size "
        "num_experts num_experts_per_tok norm_topk_prob"
    ),
)
