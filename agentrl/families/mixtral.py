"""Mixtral: Mistral with experts in every layer."""

from agentrl.families.family import SPARSE, Family, Model, Settings, dense, experts, gate_up, plain, words

_EXPERT = "block_sparse_moe.experts.{expert}."


def settings(model: Model) -> Settings:
    return dense(model) | experts(model, dense_layers=set(), size="intermediate_size", norm=True)


FAMILY = Family(
    settings,
    {
        **SPARSE,
        "mlp.router.weight": plain("block_sparse_moe.gate.weight"),
        "mlp.experts.linear_fc1": gate_up(_EXPERT + "w1.weight", _EXPERT + "w3.weight"),
        "mlp.experts.linear_fc2": plain(_EXPERT + "w2.weight"),
    },
    fields=words("num_local_experts num_experts_per_tok"),
)
