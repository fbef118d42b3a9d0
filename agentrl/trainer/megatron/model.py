"""From a Hugging Face checkpoint directory to Megatron's GPTModel.

Which settings of Megatron an architecture's ``config.json`` asks for is in `agentrl/families`; rotary frequencies are
those that transformers computes.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from agentrl import families
from agentrl.config.megatron_options import CHECKPOINT, layout_problems, passed_on, problems
from agentrl.config.schema import TrainerOptions
from agentrl.errors import CheckpointError, ConfigError
from agentrl.families.family import head_dim, rope, rotated_share
from agentrl.families.fields import not_computed
from agentrl.trainer.megatron import cpu
from agentrl.trainer.megatron.attention import LatentRotary, Rotary
from agentrl.trainer.megatron.conversion import Conversion
from agentrl.trainer.megatron.layers import block_spec, has_transformer_engine
from agentrl.trainer.megatron.log_probs import VocabShard
from agentrl.trainer.megatron.parallel import Layout


def resolve_dtype(options: TrainerOptions) -> torch.dtype:
    """The dtype of the weights: what was asked, or float32 on the CPU and bfloat16 on GPUs."""
    if options.dtype == "auto":
        return torch.float32 if cpu.on_cpu() else torch.bfloat16
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]


def read_config(hf_checkpoint: str | Path, *, weights: bool = True) -> PretrainedConfig:
    """``config.json`` of a checkpoint directory, without running code from it; ``weights``: that must be beside it.
    Raises CheckpointError: the directory has no ``config.json`` or no safetensors.
    Raises ConfigError: it asks for what the trainer does not compute."""
    path = Path(hf_checkpoint)
    if not (path / "config.json").is_file() or (weights and not list(path.glob("*.safetensors"))):
        raise CheckpointError(
            f"--hf-checkpoint {path} must be a directory with config.json{' and *.safetensors' if weights else ''}; "
            "download the model first and give its folder"
        )
    kind = json.loads((path / "config.json").read_text()).get("model_type")
    if kind in families.MODULES and kind not in CONFIG_MAPPING:  # published with code of its own for another's layers
        config = CONFIG_MAPPING[families.MODULES[kind]].from_pretrained(path)
    else:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    problems = list(not_computed(config.to_dict()))
    if problems:
        raise ConfigError("\n".join(f"{path / 'config.json'}: {problem}." for problem in problems))
    return config


def check_same(given: PretrainedConfig, own: PretrainedConfig, folder: Path) -> None:
    """Raise ConfigError where the model in ``folder``, whose config is ``given``, is computed in another way than
    ``own``."""
    theirs, ours = _computed(given), _computed(own)
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            raise ConfigError(
                f"{folder} is not of the policy's architecture: {key} is {theirs.get(key)!r:.60}, the policy's "
                f"{ours.get(key)!r:.60}"
            )


def _computed(hf_config: PretrainedConfig) -> dict[str, Any]:
    model = hf_config.to_dict()
    frequencies, scale = _rotary(hf_config)
    return {
        **families.family(hf_config.model_type).settings(model),
        "model_type": hf_config.model_type,
        "tie_word_embeddings": bool(getattr(hf_config, "tie_word_embeddings", False)),
        "the rotary embedding": (rope(model)["rope_type"], rope(model)["rope_theta"], scale, frequencies.tolist()),
    }


def make_conversion(
    hf_config: PretrainedConfig, options: TrainerOptions, layout: Layout, *, logits: bool = True
) -> Conversion:
    """Megatron's configuration for this architecture, with the names and layouts of its weights."""
    family, model, dtype = families.family(hf_config.model_type), hf_config.to_dict(), resolve_dtype(options)
    settings = family.settings(model)
    config_class = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    config = config_class(
        **settings,
        activation_func=torch.nn.functional.silu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1 if layout.ep > 1 else layout.tp,
        variable_seq_lengths=True,
        # One exchange a direction: of two between the same two stages at once, Megatron mixes up the lengths.
        overlap_p2p_comm=layout.vpp > 1,
        **_transformer_options(options, latent="multi_latent_attention" in settings),
    )
    scale = _rotary(hf_config)[1]
    if not config.multi_latent_attention and scale != 1.0:
        # Megatron multiplies cosine and sine with 0.1 ln(this) + 1.
        config.yarn_rotary_scaling_factor = math.exp(10.0 * (scale - 1.0))
    return Conversion(hf_config, family, config, layout, logits)


# Megatron's own choice, attention, would save nothing: both kinds of attention here keep no scores anyway.
_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}


def _transformer_options(options: TrainerOptions, *, latent: bool) -> dict[str, Any]:
    engine = has_transformer_engine()
    return {
        "sequence_parallel": options.sequence_parallel,
        "use_cpu_initialization": cpu.on_cpu(),
        # Weights come from the checkpoint.
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": engine,
        "bias_dropout_fusion": engine,
        "apply_rope_fusion": engine and not latent,
        "moe_grouped_gemm": engine,
        "moe_token_dispatcher_type": "alltoall",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "batch_p2p_comm": False,
        # The CPU's look-up of embeddings is deterministic as it is.
        "deterministic_mode": options.deterministic and not cpu.on_cpu(),
        **(_RECOMPUTE if options.recompute_activations else {}),
        **megatron_overrides(options, TransformerConfig),
    }


def check_overrides(options: TrainerOptions, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for options for Megatron that it has not, or that cannot be set for this checkpoint."""
    known = {f.name for cls in _CONFIGS for f in dataclasses.fields(cls)} | set(CHECKPOINT)
    for name in options.megatron:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"Megatron-core has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    wrong = list(problems(options.megatron, hf_config.to_dict()))
    wrong = wrong or [*layout_problems(options.megatron, options, hf_config.num_hidden_layers), *_not_here(options)]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _not_here(options: TrainerOptions) -> Iterator[str]:
    """What this machine cannot do."""
    if options.megatron.get("apply_rope_fusion") and not has_transformer_engine():
        yield "--apply-rope-fusion cannot be set: it needs TransformerEngine and a GPU; leave it out."
    if options.megatron.get("average_in_collective") and cpu.on_cpu() and dist.get_world_size() > 1:
        yield "--average-in-collective cannot be set: without GPUs ranks talk over gloo, which only sums; leave it out."


_CONFIGS = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def megatron_overrides(options: TrainerOptions, config_class: type) -> dict[str, Any]:
    """The entries of ``options.megatron`` that this Megatron configuration class is to have."""
    fields = {f.name for f in dataclasses.fields(config_class)}
    return {k: v for k, v in passed_on(options.megatron).items() if k in fields}


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states; the output layer runs in the loss.

    Logits are then computed only where a token was sampled (`log_probs.py`).
    """

    def _postprocess(self, hidden_states, *args: Any, **kwargs: Any):
        if not self.post_process or kwargs.get("labels") is not None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """[padded vocabulary / TP, hidden] of the output layer. Last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def rows_for_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, h] at token positions ``rows``, ready for the split output layer, of [T, 1, h], or [T / TP,
        1, h] with sequence parallelism."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
            return hidden.squeeze(1).index_select(0, rows)
        picked = hidden.squeeze(1).index_select(0, rows)
        return copy_to_tensor_model_parallel_region(picked, group=self.pg_collection.tp)


_SPLIT_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


def build_model(conversion: Conversion, chunk: int | None = None) -> PolicyModel:
    """This rank's part of the model, or a chunk of it, weights not yet set; without output layer where the conversion
    has no logits."""
    hf_config, config, layout = conversion.hf_config, conversion.config, conversion.layout
    frequencies, scale = _rotary(hf_config)
    last = layout.last_stage and chunk in (None, layout.vpp - 1)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config, output_norms=conversion.family.output_norms, vp_stage=chunk),
        vocab_size=conversion.padded_vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=layout.pp_rank == 0 and not chunk,
        post_process=last,
        share_embeddings_and_output_weights=conversion.tied,
        position_embedding_type="rope",
        vp_stage=chunk,
    )
    if not conversion.logits and last:
        del model.output_layer
    frequencies = frequencies.to(next(model.parameters()).device)
    if not config.multi_latent_attention:
        model.rotary_pos_emb = Rotary(frequencies, interleaved=config.rotary_interleaved)
    else:
        rotary = LatentRotary(frequencies, scale if config.rope_type == "yarn" else None)
        for layer in model.decoder.layers:
            layer.self_attention.rotary_pos_emb = rotary
    _mark_split_weights(model)
    return model


def _mark_split_weights(model: PolicyModel) -> None:
    """Say of each parameter along which dimension tensor parallelism splits it, if it does.

    Megatron's own layers say so only when they initialize weights, which we leave out; without it
    the gradient norm would count one rank's part, and the export would not gather.
    """
    for module in model.modules():
        dim = next((d for kind, d in _SPLIT_DIM.items() if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def _rotary(hf_config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32[dim / 2] and the factor of cosine and sine, exactly as transformers computes them."""
    model = hf_config.to_dict()
    parameters = rope(model)
    kind, base = parameters["rope_type"], parameters["rope_theta"]
    if kind == "default":
        width = getattr(hf_config, "qk_rope_head_dim", None) or head_dim(model)
        assert width is not None  # Megatron's configuration was made of it
        dim = int(width * rotated_share(model))
        return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return frequencies.float(), scale


def vocab_shard(model: PolicyModel, conversion: Conversion) -> VocabShard:
    """This rank's part of the vocabulary. Last stage only."""
    rows = model.output_weight().shape[0]
    start = rows * conversion.layout.tp_rank
    size = max(0, min(rows, conversion.vocab_size - start))
    return VocabShard(start=start, size=size, group=parallel_state.get_tensor_model_parallel_group())


def wrap_ddp(model: torch.nn.Module, options: TrainerOptions) -> DistributedDataParallel:
    """Megatron's data parallelism: gradients in one float32 buffer, summed over replicas."""
    settings = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": options.use_distributed_optimizer,
        **megatron_overrides(options, DistributedDataParallelConfig),
    }
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**settings), model)
