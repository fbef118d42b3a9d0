"""What the trainer computes of a checkpoint's ``config.json``. Imports no torch.

The engine reads the whole of ``config.json``; the trainer builds what is written here. Whatever else is asked for
there would make two different models, so it is refused by name before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SUPPORTED = ("qwen2", "qwen3", "llama")
"""``model_type`` of the architectures that are tested."""

ROPE_TYPES = ("default", "linear", "llama3")

_ONLY = {
    "hidden_act": ("silu", "the trainer's MLP is SwiGLU"),
    "attention_bias": (False, "the trainer's attention has no such biases"),
    "mlp_bias": (False, "the trainer's MLP has no biases"),
    "partial_rotary_factor": (1.0, "the trainer rotates whole heads"),
    "attention_multiplier": (None, "the trainer divides scores by sqrt(head_dim)"),
    "query_pre_attn_scalar": (None, "the trainer divides scores by sqrt(head_dim)"),
    "attn_logit_softcapping": (None, "the trainer does not cap scores"),
    "final_logit_softcapping": (None, "the trainer does not cap logits"),
    "logit_scale": (None, "the trainer does not scale logits"),
    "logits_scaling": (None, "the trainer does not scale logits"),
    "embedding_multiplier": (None, "the trainer does not scale embeddings"),
    "residual_multiplier": (None, "the trainer does not scale residuals"),
    "no_rope_layers": (None, "the trainer rotates in every layer"),
    "use_mrope": (False, "the trainer's positions have one axis"),
    "use_qk_norm": (False, "the trainer normalizes queries and keys as the architecture's own type says"),
    "dual_chunk_attention_config": (None, "the trainer attends to the whole sequence"),
    "quantization_config": (None, "quantized weights cannot be trained; use the unquantized checkpoint"),
}
"""Key of ``config.json`` -> the only value that is computed (None: none may be given), and why."""


def rope(model: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_type``, ``rope_theta`` and what else of the rotary embedding, wherever ``config.json`` keeps it."""
    given = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta") or model.get("rope_theta") or 10000.0
    return {**given, "rope_type": kind, "rope_theta": theta}


def head_dim(model: Mapping[str, Any]) -> int | None:
    """Width of an attention head; None where ``config.json`` does not say."""
    if model.get("head_dim"):
        return model["head_dim"]
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    return hidden // heads if hidden and heads else None


def not_computed(model: Mapping[str, Any]) -> Iterator[str]:
    """What this ``config.json`` asks for that the trainer does not compute; a sentence each, without a full stop.

    Args:
        model: the file's content, or transformers' ``config.to_dict()``.
    """
    kind = model.get("model_type")
    if kind is not None and kind not in SUPPORTED:
        yield f"model_type {kind!r} cannot be trained; supported: {', '.join(SUPPORTED)}"
        return
    for key, (value, reason) in _ONLY.items():
        given = model.get(key)
        if given not in (None, value):
            yield f"{key} {given!r:.40} is not computed: {reason}"
    window = _window(model)
    if window:
        yield f"sliding_window {window} is in force and is not computed: the trainer attends to the whole sequence"
    rotary = rope(model)
    if rotary["rope_type"] not in ROPE_TYPES:
        yield f"rope_type {rotary['rope_type']!r} is not computed; supported: {', '.join(ROPE_TYPES)}"
    elif any(isinstance(value, Mapping) for value in rotary.values()):
        yield "rope_parameters that differ between layers are not computed"
    elif rotary.get("partial_rotary_factor") not in (None, 1.0):
        part = rotary["partial_rotary_factor"]
        yield f"partial_rotary_factor {part} is not computed: {_ONLY['partial_rotary_factor'][1]}"
    experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if model.get(k)), None)
    if experts:
        yield f"{experts} {model[experts]} is not computed: mixtures of experts cannot be trained yet"


def _window(model: Mapping[str, Any]) -> int | None:
    """The sliding window, where a layer has one that is shorter than the longest sequence."""
    window, positions = model.get("sliding_window"), model.get("max_position_embeddings")
    if not window or (positions and window >= positions):
        return None
    kinds = model.get("layer_types")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if model.get("model_type") in ("qwen2", "qwen3"):
        slides = model.get("use_sliding_window") and model.get("max_window_layers", 28) < model["num_hidden_layers"]
        return window if slides else None
    return window
