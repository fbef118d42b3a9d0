"""How much a model computes for a sequence: floating-point operations of its matrix products, two a multiplication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl import families
from agentrl.families.family import Model


@dataclass(frozen=True)
class Flops:
    """Of a forward pass; a backward pass has twice as many.

    Attributes:
        token: of each token, in all layers.
        pair: of a token and each one that it attends to, itself included: the quadratic part.
        logits: of a token whose next one's log-probability is computed.
    """

    token: int
    pair: int
    logits: int

    @classmethod
    def of(cls, model: Model) -> Flops:
        """Of a ``config.json``, or transformers' ``config.to_dict()``. A mixture's tokens go through a few experts.
        Raises KeyError: no family knows the model."""
        settings = families.family(model["model_type"]).settings(model)
        layers, hidden = settings["num_layers"], settings["hidden_size"]
        attention, pair = _attention(settings)
        sparse = sum(settings.get("moe_layer_freq") or ())
        dense = 3 * hidden * settings["ffn_hidden_size"]
        token = layers * attention + (layers - sparse) * dense + sparse * _experts(settings)
        return cls(2 * token, 2 * layers * pair, 2 * hidden * model["vocab_size"])

    def sequence(self, length: int, sampled: int = 0) -> int:
        """Of ``length`` tokens, of which ``sampled`` have log-probabilities computed."""
        return self.token * length + self.pair * length * (length + 1) // 2 + self.logits * sampled


def _attention(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Multiplications of a layer's attention: of the projections of a token, and of a pair."""
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    if not settings.get("multi_latent_attention"):
        width, groups = settings["kv_channels"], settings["num_query_groups"]
        return 2 * hidden * width * (heads + groups), 2 * heads * width
    own, rotated, value = (settings[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    rank, queries = settings["kv_lora_rank"], heads * (own + rotated)
    low = settings.get("q_lora_rank")
    query = low * (hidden + queries) if low else hidden * queries
    keys = hidden * (rank + rotated) + rank * heads * (own + value)
    return query + keys + heads * value * hidden, heads * (own + rotated + value)


def _experts(settings: Mapping[str, Any]) -> int:
    """Multiplications of a token in a layer with experts; 0 where a model has none."""
    hidden, experts = settings["hidden_size"], settings.get("num_moe_experts")
    if not experts:
        return 0
    width = settings["moe_router_topk"] * (settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"])
    shared = settings.get("moe_shared_expert_intermediate_size") or 0
    gate = hidden if settings.get("moe_shared_expert_gate") else 0
    return 3 * hidden * (width + shared) + hidden * experts + gate
