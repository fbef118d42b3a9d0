"""What the trainer computes of a checkpoint's ``config.json``. Imports no torch.

The engine reads the whole of ``config.json``; the trainer builds what the family's file says. Whatever else is asked
for there would make two different models, so it is refused by name before anything starts: a value that is not
computed, and a field that nobody here has looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentrl.families import MODULES, of
from agentrl.families.family import Model, experts_of, rope, rotated_share, words
from agentrl.loading import toml_beside

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_TABLES = toml_beside(__file__, "fields.toml")
COMMON = words(_TABLES["common"])
"""Fields that are computed in every family."""
NEUTRAL = words(" ".join(_TABLES["neutral"].values()))
"""Fields that change nothing in what is computed of a sequence."""
EXPERTS = words("num_experts num_local_experts n_routed_experts")
"""Fields that count experts; a family without experts has none."""
_ONLY = _TABLES["only"] | {name: (None, reason) for name, reason in _TABLES["never"].items()}
"""Field -> the only value that is computed (None: none may be given), and why; a family may know more."""

_ROPE = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": words(
        "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim attention_factor truncate"
    ),
}
_ROPE_ALWAYS = words("rope_type type rope_theta partial_rotary_factor max_position_embeddings")

_FLAG_FOR_WINDOW = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
_FROM_A_LAYER_ON = ("qwen2", "qwen3")
"""Of these, the kinds whose layers slide from ``max_window_layers`` on."""


def known(model_type: str | None) -> frozenset[str]:
    """Fields of ``config.json`` that somebody has looked at, in this family."""
    family = of({"model_type": model_type})
    more = family.fields | family.only.keys() if family else frozenset()
    return COMMON | NEUTRAL | EXPERTS | _ONLY.keys() | more


def not_computed(model: Model) -> Iterator[str]:
    """What this ``config.json``, or transformers' ``config.to_dict()``, asks for that the trainer does not compute; a
    sentence each, without a full stop."""
    kind = model.get("model_type")
    if kind is not None and kind not in MODULES:
        yield f"model_type {kind!r} cannot be trained; supported: {', '.join(MODULES)}"
        return
    family = of(model)
    fields = family.fields if family else frozenset()
    only = {key: rule for key, rule in _ONLY.items() if key not in fields}
    for key, value in (family.only if family else {}).items():
        only[key] = (value, "the trainer computes the architecture as it was published")
    for key, (value, reason) in only.items():
        given = model.get(key)
        if given not in (None, value):
            yield f"{key} {given!r:.40} is not computed: {reason}"
    for key in sorted(model.keys() - known(kind)):
        # What is off or empty asks for nothing; what begins with _ is a note of transformers.
        if model[key] and not key.startswith("_"):
            yield (
                f"{key} {model[key]!r:.40} is not known here, so nobody can say whether engine and trainer would "
                "compute the same; where it changes nothing, take it out of the file"
            )
    window = _window(model)
    if window:
        yield f"sliding_window {window} is in force and is not computed: the trainer attends to the whole sequence"
    yield from _rotary(model, "partial_rotary_factor" in fields)
    experts = experts_of(model)
    if family and experts and "num_experts_per_tok" not in fields:
        yield f"{experts} experts are not computed: the architecture has none"
    if family:
        yield from family.wrong(model)


def _rotary(model: Model, partial: bool) -> Iterator[str]:
    rotary = rope(model)
    kind = rotary["rope_type"]
    if kind not in ROPE_TYPES:
        yield f"rope_type {kind!r} is not computed; supported: {', '.join(ROPE_TYPES)}"
    elif any(isinstance(value, Mapping) for value in rotary.values()):
        yield "rope_parameters that differ between layers are not computed"
    else:
        if not partial and (share := rotary.get("partial_rotary_factor")) not in (None, 1.0):
            yield f"partial_rotary_factor {share} is not computed: {_ONLY['partial_rotary_factor'][1]}"
        for key in sorted(key for key in rotary.keys() - _ROPE[kind] - _ROPE_ALWAYS if rotary[key]):
            yield f"{key} {rotary[key]!r:.40} of the rotary embedding is not computed with rope_type {kind!r}"
        if kind == "yarn" and (rotary.get("attention_factor") or 1.0) < 1.0:
            yield f"attention_factor {rotary['attention_factor']} of the rotary embedding is not computed below 1"
        if kind not in ("default", "yarn") and rotated_share(model) != 1.0:
            yield f"rope_type {kind!r} is not computed where only a share {rotated_share(model)} of a head is rotated"


def _window(model: Model) -> int | None:
    """The sliding window, where a layer has one that is shorter than the longest sequence."""
    window, positions = model.get("sliding_window"), model.get("max_position_embeddings")
    if not window or (positions and window >= positions):
        return None
    kinds = model.get("layer_types")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if model.get("model_type") in _FLAG_FOR_WINDOW:
        first = model.get("max_window_layers", 28) if model["model_type"] in _FROM_A_LAYER_ON else 0
        slides = model.get("use_sliding_window") and first < model["num_hidden_layers"]
        return window if slides else None
    return window
