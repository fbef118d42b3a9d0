"""From a Hugging Face checkpoint directory to Megatron's GPTModel, by mbridge.

mbridge knows how an architecture's ``config.json`` maps to Megatron's configuration and how the
weights are named and laid out on both sides. What it lacks for us is filled here: the names of the
local layer spec, a per-model copy of its name tables (it edits class attributes), and rotary
frequencies as transformers computes them (transformers 5 keeps them in ``rope_parameters``).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.bridge import Bridge
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

from agentrl.config.architecture import not_computed, rope
from agentrl.config.megatron_options import CHECKPOINT, passed_on, problems
from agentrl.config.schema import TrainerOptions
from agentrl.errors import CheckpointError, ConfigError, first_few
from agentrl.trainer.megatron import cpu
from agentrl.trainer.megatron.attention import PackedSequences
from agentrl.trainer.megatron.bridges import bridge_class
from agentrl.trainer.megatron.layers import block_spec, has_transformer_engine
from agentrl.trainer.megatron.log_probs import VocabShard
from agentrl.trainer.megatron.parallel import Layout


def resolve_dtype(options: TrainerOptions) -> torch.dtype:
    """The dtype of the weights: what was asked, or float32 on the CPU and bfloat16 on GPUs."""
    if options.dtype == "auto":
        return torch.float32 if cpu.on_cpu() else torch.bfloat16
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]


def read_config(hf_checkpoint: str | Path) -> PretrainedConfig:
    """``config.json`` of a checkpoint directory, without running code from it.

    Raises:
        CheckpointError: the directory has no ``config.json`` or no safetensors.
        ConfigError: it asks for what the trainer does not compute.
    """
    path = Path(hf_checkpoint)
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        raise CheckpointError(
            f"--hf-checkpoint {path} must be a directory with config.json and *.safetensors; "
            "download the model first and give its folder"
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    problems = list(not_computed(config.to_dict()))
    if problems:
        raise ConfigError("\n".join(f"{path / 'config.json'}: {problem}." for problem in problems))
    return config


def load_weights(model: PolicyModel, bridge: Bridge, path: str | Path) -> None:
    """Set the weights of this rank's part from a checkpoint directory. Collective.

    Raises:
        ConfigError: the checkpoint has a tensor that no part of the model takes.
        CheckpointError: it lacks one that the model needs.
    """
    local = bridge._weight_name_mapping_mcore_local_to_global(model).values()
    mine = {hf for name in local if "_extra_state" not in name for hf in bridge._weight_name_mapping_mcore_to_hf(name)}
    wanted = [mine]
    if bridge.mpu.pp_size > 1:
        wanted = [set()] * bridge.mpu.pp_size
        dist.all_gather_object(wanted, mine, group=bridge.mpu.pp_group)
    needed = set().union(*wanted)
    there = set(bridge._get_safetensor_io(str(path)).load_hf_weight_names())
    missing = sorted(needed - there)
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(needed)} tensors of the model that its config.json describes: "
            f"{first_few(missing)}"
        )
    # Old files keep rotary frequencies; a tied head is the embedding, whatever the file has for it.
    tied = bool(getattr(bridge.hf_config, "tie_word_embeddings", False))
    unused = sorted(
        name
        for name in there - needed
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    )
    if unused:
        raise ConfigError(
            f"{len(unused)} of the {len(there)} tensors in {path} are no part of the model that the trainer builds: "
            f"{first_few(unused)}. The engine would use them, the trainer would not: such a checkpoint cannot be "
            "trained."
        )
    with torch.no_grad():
        bridge.load_weights([model], str(path))


def make_bridge(hf_config: PretrainedConfig, options: TrainerOptions, layout: Layout) -> Bridge:
    """mbridge's bridge for this architecture, with Megatron's configuration as ``.config``."""
    base = bridge_class(hf_config.model_type)
    cpu.install()  # into its modules, too
    tied = bool(getattr(hf_config, "tie_word_embeddings", False))
    direct = {**base._DIRECT_MAPPING, "output_layer.weight": "lm_head.weight"}
    if tied:
        direct["output_layer.weight"] = "model.embed_tokens.weight"
    norms = {
        "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }
    cls = type(
        base.__name__,
        (base,),
        {
            "_DIRECT_MAPPING": direct,
            "_OTHER_MAPPING": {**base._OTHER_MAPPING, **norms},
            "_MLP_MAPPING": {**base._MLP_MAPPING, **norms},
        },
    )
    padded = hf_config.vocab_size % layout.tp != 0
    bridge = cls(
        hf_config,
        dtype=resolve_dtype(options),
        make_vocab_size_divisible_by=layout.tp if padded else None,
    )
    bridge.set_extra_args(**_transformer_options(options))
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = math.ceil(hf_config.vocab_size / layout.tp) * layout.tp
    return bridge


# Megatron's own choice, attention, would save nothing: both kinds of attention here keep no scores anyway.
_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


def _transformer_options(options: TrainerOptions) -> dict[str, Any]:
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
        "apply_rope_fusion": engine,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
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
    if wrong:
        raise ConfigError("\n".join(wrong))


_CONFIGS = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def megatron_overrides(options: TrainerOptions, config_class: type) -> dict[str, Any]:
    """The entries of ``options.megatron`` that this Megatron configuration class is to have."""
    fields = {f.name for f in dataclasses.fields(config_class)}
    return {k: v for k, v in passed_on(options.megatron).items() if k in fields}


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states; the output layer runs in the loss.

    Logits are then computed only where a token was sampled (`log_probs.py`).
    """

    def _preprocess(self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any):
        out = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params is None or packed_seq_params.qkv_format == "thd":
            return out
        table, positions = out[1], packed_seq_params.positions
        return (out[0], table.index_select(0, positions), *out[2:])

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
        """Hidden states [N, h] at token positions ``rows``, ready for the split output layer.

        Args:
            hidden: [T, 1, h], or [T / TP, 1, h] with sequence parallelism.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
            return hidden.squeeze(1).index_select(0, rows)
        picked = hidden.squeeze(1).index_select(0, rows)
        return copy_to_tensor_model_parallel_region(picked, group=self.pg_collection.tp)


_SPLIT_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


def build_model(bridge: Bridge, layout: Layout) -> PolicyModel:
    """This rank's part of the model, weights not yet set."""
    hf_config, config = bridge.hf_config, bridge.config
    base, frequencies = _rotary(hf_config)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=bridge.padded_vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=layout.pp_rank == 0,
        post_process=layout.last_stage,
        share_embeddings_and_output_weights=bool(getattr(hf_config, "tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=base,
    )
    model.rotary_pos_emb.inv_freq = frequencies.to(model.rotary_pos_emb.inv_freq.device)
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


def _rotary(hf_config: PretrainedConfig) -> tuple[float, torch.Tensor]:
    """Base and inverse frequencies float32[dim / 2] exactly as transformers computes them."""
    parameters = rope(hf_config.to_dict())
    kind, base = parameters["rope_type"], parameters["rope_theta"]
    if kind == "default":
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return base, 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return base, frequencies.float()


def vocab_shard(model: PolicyModel, bridge: Bridge, layout: Layout) -> VocabShard:
    """This rank's part of the vocabulary. Last stage only."""
    rows = model.output_weight().shape[0]
    start = rows * layout.tp_rank
    size = max(0, min(rows, bridge.vocab_size - start))
    return VocabShard(start=start, size=size, group=bridge.mpu.tp_group)


def wrap_ddp(model: torch.nn.Module, options: TrainerOptions) -> DistributedDataParallel:
    """Megatron's data parallelism: gradients in one float32 buffer, summed over replicas."""
    settings = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": options.use_distributed_optimizer,
        **megatron_overrides(options, DistributedDataParallelConfig),
    }
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**settings), model)
