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
from agentrl.families.family import dense, head_dim, rope, rotated_share

Model = Mapping[str, Any]

ACTS = frozenset(
    {
        # memory against time
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        # kernels
        "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "clone_scatter_output_in_embedding",
        "disable_bf16_reduced_precision_matmul",
        # pipeline stages
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "batch_p2p_comm", "batch_p2p_sync",
        "virtual_pipeline_model_parallel_size",
        # gradients and the optimizer
        "adam_eps", "apply_wd_to_qk_layernorm", "decoupled_weight_decay", "average_in_collective", "bucket_size",
        "overlap_grad_reduce", "overlap_param_gather", "pad_buckets_for_high_nccl_busbw",
    }
)  # fmt: skip
"""Options that are handed to Megatron and do there what Megatron says."""


CHECKPOINT = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_percent": "share of a head that is rotated",
    "rotary_interleaved": "interleaving of rotated pairs",
    "normalization": "normalization",
    "qk_layernorm": "normalization of queries and keys",
    "add_qkv_bias": "bias of queries, keys and values",
    "add_bias_linear": "bias of linear layers",
    "gated_linear_unit": "gated MLP",
    "softmax_scale": "scale of attention scores",
    "softmax_type": "softmax of attention",
    "window_size": "attention window in force",
    "layernorm_zero_centered_gamma": "zero-centred norm weights",
}
"""Option that must be what the checkpoint says -> what that is called."""


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


_DROPOUT = "the engine samples without dropout, so the policy that is trained would not be the one that acts"

ONLY = {
    "hidden_dropout": (0.0, _DROPOUT),
    "attention_dropout": (0.0, _DROPOUT),
    "optimizer": ("adam", "checkpoints of the trainer hold Adam's two moments"),
    "grad_reduce_in_fp32": (True, "gradients are summed in float32"),
    "attention_softmax_in_fp32": (True, "the softmax of attention is computed in float32"),
}
"""Option -> the only value it can have here, and why."""

_EXPERTS = "the experts are what the checkpoint's architecture has"
_MTP = "multi-token prediction is not trained"
_ATTENTION = "the attention is what the checkpoint's architecture has"
_EIGHT_BIT = "training in 8 or 4 bits is not available"
_CONTEXT = "--context-parallel-size is 1"
_MOMENTS = "a checkpoint of the trainer holds Adam's two moments in float32, and no other state"
_LOADED = "weights come from the checkpoint"
_ENGINE = "it needs TransformerEngine, whose modules are not told of it here"
_FUSED = "it needs CUDA and a kernel of apex or TransformerEngine, with which it has not been tried"
_NOTHING = "it would do nothing here"
_FSDP = "Megatron's FSDP is not available"
_UNTRIED = "it has not been tried with this trainer"

REFUSED = {
    name: reason
    for reason, names in {
        _EXPERTS: (
            "num_moe_experts moe_* expert_tensor_parallel_size overlap_moe_expert_parallel_comm "
            "ep_overlap_early_attn_memory_release"
        ),
        _MTP: "mtp_num_layers mtp_loss_scaling_factor mtp_standalone",
        _ATTENTION: (
            "window_attn_skip_freq qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold attention_output_gate "
            "multi_latent_attention no_rope_freq experimental_attention_variant dsa_* linear_* mrope_section "
            "is_hybrid_model mamba_* use_mamba_mem_eff_path heterogeneous_block_specs hetereogenous_dist_checkpoint "
            "apply_query_key_layer_scaling apply_residual_connection_post_layernorm glu_linear_offset "
            "activation_func_clamp_value q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
            "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
            "cache_mla_latents"
        ),
        _EIGHT_BIT: (
            "fp8 fp8_* fp4 fp4_* tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 "
            "num_layers_at_end_in_bf16 use_kitchen use_kitchen_attention kitchen_attention_backend "
            "activation_func_fp8_input_store disable_parameter_transpose_cache reuse_grad_buf_for_mxfp8_param_ag "
            "keep_fp8_transpose_cache fp32_residual_connection enable_autocast"
        ),
        _CONTEXT: "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel cp_comm_type",
        _MOMENTS: (
            "use_precision_aware_optimizer store_param_remainders optimizer_cpu_offload optimizer_offload_fraction "
            "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params "
            "sgd_momentum muon_*"
        ),
        _LOADED: ("use_cpu_initialization init_method_std embedding_init_method_std init_model_with_meta_device"),
        _ENGINE: (
            "tp_comm_* use_te_rng_tracker use_te_activation_func delay_wgrad_compute symmetric_ar_type "
            "fused_single_qkv_rope cpu_offloading cpu_offloading_* fine_grained_activation_offloading offload_modules "
            "min_offloaded_tensor_size"
        ),
        _FUSED: "gradient_accumulation_fusion",
        _NOTHING: (
            "cross_entropy_loss_fusion cross_entropy_fusion_impl masked_softmax_fusion persist_layer_norm "
            "memory_efficient_layer_norm use_fused_weighted_squared_relu async_tensor_model_parallel_allreduce "
            "defer_embedding_wgrad_compute "
            "wgrad_deferral_limit barrier_with_L1_time log_max_attention_logit log_num_zeros_in_grad loss_scale "
            "initial_loss_scale min_loss_scale loss_scale_window hysteresis inference_* use_inference_optimized_layers "
            "flash_decode batch_invariant_mode mlp_chunks_for_prefill"
        ),
        _FSDP: (
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy gradient_reduce_div_fusion "
            "suggested_communication_unit_size preserve_fp32_weights nccl_ub fsdp_double_buffer "
            "outer_dp_sharding_strategy disable_symmetric_registration fsdp_manual_registration"
        ),
        "a step whose gradients are not finite is left out and counted": "check_for_nan_in_grad check_for_large_grads",
        _UNTRIED: (
            "overlap_p2p_comm_warmup_flush overlap_param_gather_with_optimizer_step align_param_gather "
            "enable_cuda_graph cuda_graph_* external_cuda_graph test_mode config_logger_dir decoupled_lr "
            "decoupled_min_lr num_microbatches_with_partial_activation_checkpoints use_ring_exchange_p2p "
            "deallocate_pipeline_outputs distribute_saved_activations pipeline_model_parallel_layout "
            "pipeline_model_parallel_comm_backend account_for_embedding_in_pipeline_split "
            "account_for_loss_in_pipeline_split num_distributed_optimizer_instances "
            "reduce_scatter_with_fp32_accumulation"
        ),
    }.items()
    for name in names.split()
}
"""Option, or beginning of a name with ``*``, -> why it cannot be set. Its default, or switching it off, is accepted."""

OWNED = {
    "tensor_model_parallel_size": "use --tensor-model-parallel-size",
    "pipeline_model_parallel_size": "use --pipeline-model-parallel-size",
    "context_parallel_size": "use --context-parallel-size",
    "expert_model_parallel_size": "use --expert-model-parallel-size",
    "microbatch_group_size_per_vp_stage": "it is the number of pipeline stages",
    "overlap_p2p_comm": "it is on where the pipeline is interleaved (--virtual-pipeline-model-parallel-size)",
    "sequence_parallel": "use --sequence-parallel",
    "use_distributed_optimizer": "use --use-distributed-optimizer",
    "lr": "use --lr",
    "min_lr": "use --min-lr",
    "weight_decay": "use --weight-decay",
    "adam_beta1": "use --adam-beta1",
    "adam_beta2": "use --adam-beta2",
    "clip_grad": "use --clip-grad",
    "bf16": "use --dtype bf16",
    "fp16": "use --dtype bf16 (fp16 is not supported)",
    "params_dtype": "use --dtype",
    "pipeline_dtype": "use --dtype",
    "autocast_dtype": "use --dtype",
    "deterministic_mode": "use --deterministic",
    "perform_initialization": "weights come from the checkpoint",
    "transformer_impl": "TransformerEngine's modules are used where it is installed",
    "variable_seq_lengths": "micro-batches are always packed",
    "calculate_per_token_loss": "the loss is always a mean over all tokens of a step",
}
"""Options of Megatron that follow from options of ours or from the run, and from which."""


AT_LEAST = {
    "bucket_size": 1,
    "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": 1,
    "recompute_num_layers": 1,
    "virtual_pipeline_model_parallel_size": 2,
}
"""Option of numbers -> the least that it can be."""

NEEDS = {
    "bucket_size": ("overlap_grad_reduce", True),
    "overlap_param_gather": ("overlap_grad_reduce", True),
    "recompute_method": ("recompute_granularity", "full"),
    "recompute_num_layers": ("recompute_granularity", "full"),
    "recompute_modules": ("recompute_granularity", "selective"),
}
"""Option -> another and its value, without which it would do nothing."""


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

    Raises:
        ConfigError: The field follows from an option of ours, or cannot be written as text.
    """
    key = name.replace("-", "_")
    if key in OWNED:
        raise ConfigError(f"{given} cannot be set: {OWNED[key]}.")
    field = (megatron_fields() or {}).get(key)
    if field is not None and field.kind == "opaque":
        raise ConfigError(f"{given} cannot be set: Megatron takes an object here, not text.")
    return field


def problems(given: Mapping[str, Any], model: Model) -> Iterator[str]:
    """What is wrong with options given for Megatron, one sentence each.

    Args:
        given: names with underscores -> values.
        model: content of the checkpoint's ``config.json``, or transformers' ``config.to_dict()``.
    """
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
    """What is wrong with options given for Megatron where ranks share a model of so many layers, one sentence each.

    Megatron finds most of it too, but in each rank when it builds the model, or leaves an option without effect.

    Args:
        given: names with underscores -> values, of which each may be set by itself (:func:`problems`).
        layers: of the model, where that is known.
    """
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
