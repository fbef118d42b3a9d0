"""What becomes of each option of Megatron-core when it is given: it acts, it must agree with the checkpoint, or it is
refused with a reason. Imports no torch.

The model is what the checkpoint's ``config.json`` says, for the engine plays that one. An option that is in no table
(of a newer Megatron) is refused, since nobody has looked what it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.config.foreign import megatron_fields
from agentrl.config.options import Option
from agentrl.config.schema import ParallelOptions
from agentrl.errors import ConfigError
from agentrl.families import of
from agentrl.families.family import dense, head_dim, rope, rotated_share, words
from agentrl.loading import toml_beside

Model = Mapping[str, Any]

_TABLES = toml_beside(__file__, "megatron_options.toml")
ACTS = words(_TABLES["acts"])
"""Options that are handed to Megatron and do there what Megatron says."""
CHECKPOINT: dict[str, str] = _TABLES["checkpoint"]
"""Option that must be what the checkpoint says -> what that is called."""
ONLY: dict[str, tuple[Any, str]] = _TABLES["only"]
"""Option -> the only value it can have here, and why."""
REFUSED = {name: reason for reason, names in _TABLES["refused"].items() for name in names.split()}
"""Option, or beginning of a name with ``*``, -> why it cannot be set. Its default, or switching it off, is accepted."""
OWNED: dict[str, str] = _TABLES["owned"]
"""Options of Megatron that follow from options of ours or from the run, and from which."""
AT_LEAST: dict[str, int] = _TABLES["at_least"]
"""Option of numbers -> the least that it can be."""
NEEDS: dict[str, tuple[str, Any]] = _TABLES["needs"]
"""Option -> another and its value, without which it would do nothing."""


def _of_checkpoint(model: Model) -> dict[str, Any]:
    """The options of :data:`CHECKPOINT` as this ``config.json`` has them; None: not known from it."""
    family, width = of(model), head_dim(model)
    return {
        "rotary_base": rope(model)["rope_theta"],
        "rotary_percent": rotated_share(model),
        "softmax_scale": width**-0.5 if width else None,
        "softmax_type": "vanilla",
        "layernorm_zero_centered_gamma": False,
        **(family.settings(model) if family else dense(model, qk_layernorm=None, add_qkv_bias=None)),
    }


def refusal(name: str) -> str | None:
    """Why an option cannot be set; None where it can, be it to one value only."""
    if name in ACTS or name in CHECKPOINT or name in ONLY:
        return None
    if name in OWNED:
        return OWNED[name]
    families = (name[:end] + "*" for end in range(len(name), 0, -1) if name[end - 1] == "_")
    found = next((key for key in (name, *families) if key in REFUSED), None)
    return REFUSED[found] if found else "this version of agentrl does not know what it does"


def megatron_field(given: str, name: str) -> Option | None:
    """The Megatron config field called ``name``, or None when there is none (or megatron-core is absent).
    Raises ConfigError: the field follows from an option of ours, or cannot be written as text."""
    key = name.replace("-", "_")
    if key in OWNED:
        raise ConfigError(f"{given} cannot be set: {OWNED[key]}.")
    field = (megatron_fields() or {}).get(key)
    if field is not None and field.kind == "opaque":
        raise ConfigError(f"{given} cannot be set: Megatron takes an object here, not text.")
    return field


def problems(given: Mapping[str, Any], model: Model) -> Iterator[str]:
    """What is wrong with options ``given`` for Megatron (names with underscores), one sentence each. ``model``: content
    of the checkpoint's ``config.json``, or transformers' ``config.to_dict()``."""
    fields = megatron_fields() or {}
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if name in CHECKPOINT:
            expected, called = _of_checkpoint(model).get(name), CHECKPOINT[name]
            unknown = expected is None and name != "window_size"
            if not (unknown or value == expected or (not value and not expected)):
                yield (
                    f"{flag} {value} does not agree with the model's {called} {expected}: it is read from the "
                    "checkpoint, leave the flag out."
                )
            continue
        if name in ONLY and value != ONLY[name][0]:
            yield f"{flag} {value} cannot be set: {ONLY[name][1]}; only {ONLY[name][0]} is available."
        if name == "recompute_modules" and set(value or ()) - {"mlp", "core_attn"}:
            yield f"{flag} {' '.join(value)} cannot be set: mlp and core_attn can be recomputed, or whole layers."
        reason = refusal(name)
        default = fields[name].default if name in fields else None
        if reason and (name in OWNED or (value and value != default)):
            yield f"{flag} {value} cannot be set: {reason}."


def layout_problems(given: Mapping[str, Any], parallel: ParallelOptions, layers: int | None) -> Iterator[str]:
    """What is wrong with options given for Megatron, each of which may be set by itself, where ranks share a model of
    so many layers (if that is known), one sentence each.

    Megatron finds most of it too, but in each rank when it builds the model, or leaves an option without effect."""
    flags = {name: _flag(name, value) for name, value in given.items()}
    wrong = [name for name, least in AT_LEAST.items() if name in given and given[name] < least]
    yield from (f"{flags[name]} is too small: it must be at least {AT_LEAST[name]}." for name in wrong)
    if "adam_eps" in given and not 0 < given["adam_eps"] < 1:
        yield f"{flags['adam_eps']}: it must be more than 0 and less than 1."
    for name, (other, value) in NEEDS.items():
        selective = name == "recompute_modules" and parallel.recompute_activations
        if given.get(name) and given.get(other) != value and not selective:
            yield f"{flags[name]} would do nothing: it needs {_flag(other, value)}."
    for name in ("overlap_param_gather", "pad_buckets_for_high_nccl_busbw"):
        if given.get(name) and not parallel.use_distributed_optimizer:
            yield f"{flags[name]} would do nothing: it needs --use-distributed-optimizer."
    full = ("recompute_method", "recompute_num_layers")
    if given.get("recompute_granularity") == "full" and not all(given.get(name) for name in full):
        yield (
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers: uniform and 1 keep the "
            "least."
        )
    if given.get("virtual_pipeline_model_parallel_size") and given.get("batch_p2p_comm"):
        yield (
            f"{flags['batch_p2p_comm']} does not go with {flags['virtual_pipeline_model_parallel_size']}: stages of an "
            "interleaved pipeline exchange one direction at a time."
        )
    if not wrong:
        yield from _stage_problems(given, flags, parallel.pipeline_model_parallel_size, layers)


def _flag(name: str, value: Any) -> str:
    words = () if value is True else value if isinstance(value, list | tuple) else (value,)
    return " ".join([f"--{name.replace('_', '-')}", *map(str, words)])


def _stage_problems(
    given: Mapping[str, Any], flags: Mapping[str, str], stages: int, layers: int | None
) -> Iterator[str]:
    virtual = "virtual_pipeline_model_parallel_size"
    ends, chunks = [name for name in given if name.startswith("num_layers_in_")], given.get(virtual)
    if stages == 1 and (ends or chunks):
        names = " and ".join(flags[name] for name in (*ends, virtual) if name in given)
        yield f"{names} would do nothing: it needs --pipeline-model-parallel-size of at least 2."
    elif layers is not None:
        middle, left = stages - len(ends), layers - sum(given[name] for name in ends)
        if not ends and left % stages:
            yield f"--pipeline-model-parallel-size {stages} does not divide the model's num_hidden_layers {layers}."
        elif left < 0 or bool(left) != bool(middle) or (middle and left % middle):
            yield (
                f"{' and '.join(flags[name] for name in ends)} of the model's num_hidden_layers {layers} leaves {left} "
                f"for {middle} other stages of --pipeline-model-parallel-size {stages}: these must have equally many."
            )
        else:
            sizes = {*(given[name] for name in ends), *([left // middle] if middle else [])}
            if odd := sorted(size for size in sizes if chunks and size % chunks):
                yield f"{flags[virtual]} does not divide the {odd[0]} layers of a pipeline stage into equal chunks."
            elif given.get("recompute_num_layers", 0) > (most := max(sizes) // (chunks or 1)):
                yield f"{flags['recompute_num_layers']} is more than the {most} layers that a rank runs at a time."


def passed_on(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of options without :func:`problems`, those that Megatron is to be told of."""
    return {name: value for name, value in given.items() if name in ACTS}
