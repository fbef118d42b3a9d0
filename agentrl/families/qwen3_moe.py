"""Qwen3-MoE: Qwen3 with experts."""

from agentrl.families.family import SPARSE, Family, Model, Settings, dense, experts, sparse_steps, words


def settings(model: Model) -> Settings:
    return dense(model, qk_layernorm=True) | experts(
        model, dense_layers=sparse_steps(model), norm=bool(model.get("norm_topk_prob"))
    )


FAMILY = Family(
    settings,
    SPARSE,
    fields=words(
        "decoder_sparse_step mlp_only_layers moe_intermediate_size num_experts num_local_experts "
        "num_experts_per_tok norm_topk_prob"
    ),
)
