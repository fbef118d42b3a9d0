"""What a family is: Megatron's settings made of ``config.json``, and where each of its parameters comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Model = Mapping[str, Any]
"""Content of a ``config.json``, or transformers' ``config.to_dict()``."""

Settings = dict[str, Any]
"""Names and values of Megatron's TransformerConfig, or MLATransformerConfig."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Source:
    """The Hugging Face tensors of which one parameter of Megatron's is made.

    Attributes:
        names: of the tensors; within a layer without ``model.layers.N.``, and with ``{expert}`` for its number.
        layout: how they lie in the parameter. ``plain``: one, as it is. ``qkv``: three, group by group, the queries of
            a group before its key and value. ``gate_up``: gate above up, of two tensors or of one that has both.
            ``vocabulary``: one, with rows added until it can be split.
    """

    names: tuple[str, ...]
    layout: Literal["plain", "qkv", "gate_up", "vocabulary"] = "plain"

    def at(self, prefix: str, expert: str | None) -> Source:
        """The same with the names that the tensors have in a file."""
        return replace(self, names=tuple(prefix + name.replace("{expert}", expert or "") for name in self.names))


def plain(name: str) -> Source:
    return Source((name,))


def gate_up(*names: str) -> Source:
    return Source(names, "gate_up")


Layer = Mapping[str, Source]
"""Megatron's name of a parameter within a layer -> its source. Experts are called ``mlp.experts.linear_fcN``."""

NORMS: Layer = {
    "input_layernorm.weight": plain("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": plain("post_attention_layernorm.weight"),
    # TransformerEngine computes a norm together with the projection that follows.
    "self_attention.linear_qkv.layer_norm_weight": plain("input_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": plain("post_attention_layernorm.weight"),
}
ATTENTION: Layer = {
    "self_attention.linear_qkv.weight": Source(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv"),
    "self_attention.linear_qkv.bias": Source(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv"),
    "self_attention.linear_proj.weight": plain("self_attn.o_proj.weight"),
    "self_attention.q_layernorm.weight": plain("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": plain("self_attn.k_norm.weight"),
}
LATENT_ATTENTION: Layer = {
    "self_attention.linear_q_proj.weight": plain("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": plain("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": plain("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": plain("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": plain("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": plain("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": plain("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": plain("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": plain("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": plain("self_attn.o_proj.weight"),
}
MLP: Layer = {
    "mlp.linear_fc1.weight": gate_up("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": plain("mlp.down_proj.weight"),
}
EXPERTS: Layer = {
    "mlp.router.weight": plain("mlp.gate.weight"),
    "mlp.router.expert_bias": plain("mlp.gate.e_score_correction_bias"),
    "mlp.experts.linear_fc1": gate_up("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "mlp.experts.linear_fc2": plain("mlp.experts.{expert}.down_proj.weight"),
}
DENSE: Layer = {**NORMS, **ATTENTION, **MLP}
SPARSE: Layer = {**DENSE, **EXPERTS}
"""A layer of most families, and one of them with experts."""


def shared_experts(name: str) -> Layer:
    """The experts that see every token, under the name that the family gives them."""
    return {
        "mlp.shared_experts.linear_fc1.weight": gate_up(f"mlp.{name}.gate_proj.weight", f"mlp.{name}.up_proj.weight"),
        "mlp.shared_experts.linear_fc2.weight": plain(f"mlp.{name}.down_proj.weight"),
    }


_OUTSIDE = {
    "embedding.word_embeddings.weight": Source(("model.embed_tokens.weight",), "vocabulary"),
    "decoder.final_layernorm.weight": plain("model.norm.weight"),
    "output_layer.weight": Source(("lm_head.weight",), "vocabulary"),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(linear_fc\d)\.weight")


def _nothing(model: Model) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        settings: Megatron's settings of a ``config.json``; None where it does not say.
        layer: sources of the parameters of a layer.
        fields: of ``config.json`` that are computed, beside those of every family.
        only: field -> the only value of it that is computed, where ``config.json`` has it.
        wrong: what else a ``config.json`` may ask for that is not computed; a sentence each, without a full stop.
        output_norms: attention and MLP are normalized before they are added to the residual, too.
    """

    settings: Callable[[Model], Settings]
    layer: Layer
    fields: frozenset[str] = frozenset()
    only: Mapping[str, Any] = field(default_factory=dict)
    wrong: Callable[[Model], Iterator[str]] = _nothing
    output_norms: bool = False

    def source(self, name: str) -> Source:
        """Where Megatron's parameter ``name`` comes from, with numbers of the whole model:
        ``decoder.layers.3.mlp.experts.17.linear_fc1.weight``.
        Raises KeyError: the family has no such parameter."""
        if not (found := _LAYER.fullmatch(name)):
            return _OUTSIDE[name]
        number, rest = found.groups()
        expert = _EXPERT.fullmatch(rest)
        key = f"mlp.experts.{expert[2]}" if expert else rest
        return self.layer[key].at(f"model.layers.{number}.", expert[1] if expert else None)


def head_dim(model: Model) -> int | None:
    """Width of an attention head; None where ``config.json`` does not say."""
    if model.get("head_dim"):
        return model["head_dim"]
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    return hidden // heads if hidden and heads else None


def rope(model: Model) -> dict[str, Any]:
    """``rope_type``, ``rope_theta`` and what else of the rotary embedding, wherever ``config.json`` keeps it."""
    given = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta") or model.get("rope_theta") or 10000.0
    return {**given, "rope_type": kind, "rope_theta": theta}


def rotated_share(model: Model) -> float:
    """Share of a head that is rotated."""
    share = rope(model).get("partial_rotary_factor") or model.get("partial_rotary_factor")
    return 1.0 if share is None else share


def experts_of(model: Model) -> int | None:
    """How many experts a layer has, of which a token sees a few; None where there are none."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((model[key] for key in keys if model.get(key)), None)


def dense(model: Model, **changes: Any) -> Settings:
    """What all families share: RMSNorm before attention and MLP, grouped queries, rotary positions, SwiGLU."""
    return {
        "num_layers": model.get("num_hidden_layers"),
        "hidden_size": model.get("hidden_size"),
        "ffn_hidden_size": model.get("intermediate_size"),
        "num_attention_heads": model.get("num_attention_heads"),
        "num_query_groups": model.get("num_key_value_heads") or model.get("num_attention_heads"),
        "kv_channels": head_dim(model),
        "layernorm_epsilon": model.get("rms_norm_eps"),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
        **changes,
    }


def experts(
    model: Model, *, dense_layers: set[int], size: str = "moe_intermediate_size", norm: bool, **changes: Any
) -> Settings:
    """A mixture of experts in every layer but ``dense_layers``.

    Routing is softmax over the experts, or over the chosen ones where ``norm`` (which is the same as to divide by their
    sum). There is no loss that balances experts: it would be another objective than the reward.
    """
    return {
        "num_moe_experts": experts_of(model),
        "moe_ffn_hidden_size": model.get(size),
        "moe_layer_freq": [int(n not in dense_layers) for n in range(model.get("num_hidden_layers") or 0)],
        "moe_router_topk": model.get("num_experts_per_tok"),
        "moe_router_pre_softmax": not norm,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Of thousands of experts some scores are nearly equal: in bf16 engine and trainer would choose others.
        "moe_router_dtype": "fp32",
        **changes,
    }


def _sigmoid_routing(model: Model) -> Settings:
    """DeepSeek-V3's routing (arXiv:2412.19437, eq. 12 to 16): sigmoid scores, chosen with a bias, within chosen groups.

    The bias is what the checkpoint has and stays so: it is moved by counts, in pre-training.
    """
    grouped = (model.get("n_group") or 1) > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": model.get("routed_scaling_factor"),
        "moe_router_num_groups": model.get("n_group") if grouped else None,
        "moe_router_group_topk": model.get("topk_group") if grouped else None,
        "moe_shared_expert_intermediate_size": (model.get("moe_intermediate_size") or 0)
        * (model.get("n_shared_experts") or 0)
        or None,
    }


def _sigmoid_routing_wrong(model: Model) -> Iterator[str]:
    """What DeepSeek-V3's routing may be asked for that Megatron does not compute."""
    chosen, groups = model.get("num_experts_per_tok") or 8, model.get("topk_group") or 1
    if chosen < 2:
        yield f"num_experts_per_tok {chosen} is not computed: scores of a single expert are not normalized"
    if (model.get("n_group") or 1) > 1 and chosen // groups != 2:
        yield (
            f"num_experts_per_tok {chosen} with topk_group {groups} is not computed: Megatron scores a group of "
            "experts by as many as are chosen of each, the architecture by two"
        )


_SIGMOID_ROUTING = words(
    "moe_intermediate_size num_experts_per_tok n_shared_experts n_routed_experts routed_scaling_factor "
    "n_group topk_group first_k_dense_replace num_nextn_predict_layers"
)


def sigmoid_routed(settings: Callable[[Model], Settings], layer: Layer, fields: str, **only: Any) -> Family:
    """A family with :func:`_sigmoid_routing` and shared experts, the first layers dense. ``settings``, sources of a
    ``layer``, ``fields`` and ``only`` are what it has beside that."""

    def with_experts(model: Model) -> Settings:
        first = set(range(model.get("first_k_dense_replace") or 0))
        return settings(model) | experts(model, dense_layers=first, norm=True) | _sigmoid_routing(model)

    return Family(
        with_experts,
        {**layer, **EXPERTS, **shared_experts("shared_experts")},
        fields=_SIGMOID_ROUTING | words(fields),
        only={"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", **only},
        wrong=_sigmoid_routing_wrong,
    )


def sparse_steps(model: Model) -> set[int]:
    """The dense layers of a family that names them, or has experts in each n-th layer."""
    step = model.get("decoder_sparse_step") or 1
    named = set(model.get("mlp_only_layers") or ())
    return {n for n in range(model.get("num_hidden_layers") or 0) if n in named or (n + 1) % step}
