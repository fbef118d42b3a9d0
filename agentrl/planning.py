"""How much memory a run takes on each GPU (or in each process without one), and a layout that fits.

Counted, not guessed: the parameters from the checkpoint's own tensors, what Megatron keeps of each, what a layer keeps
of a token from the forward to the backward pass. ``benchmarks/memory_plan.py`` compares it with what processes take.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path

from agentrl.algorithms import load_algorithm
from agentrl.config.schema import AlgorithmOptions, Config
from agentrl.engines.world import TURNS, share_of_engines
from agentrl.errors import ConfigError
from agentrl.families.family import head_dim
from agentrl.trainer.tiles import TILE_BYTES, is_kept

GIB = 1 << 30
ROOM = 0.9
"""Share of a GPU's memory that a plan fills: the rest is for CUDA itself, NCCL's buffers and what falls between
blocks."""
RESIDUE = 0.05
"""Share of it that an engine keeps which gave its memory back: CUDA's context and workspaces."""
ENGINE_ROOM = 0.85
"""The same of an engine's, whose CUDA graphs and batches in the making need more."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides its memory. Numbers of parameters, of the whole model.

    Attributes:
        split: of one layer, that tensor parallelism divides; ``whole``: that every rank holds.
        experts: of one layer, those of a mixture of experts.
        embedding: one table of the vocabulary.
        ffn: width of the MLPs that a token goes through.
        latent: numbers that an engine caches of a token in a layer where the attention is multi-head latent; else 0.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    head_norms: bool
    split: int
    whole: int
    experts: int
    embedding: int
    latent: int = 0

    @property
    def parameters(self) -> int:
        tables = self.embedding * (1 if self.tied else 2)
        return self.layers * (self.split + self.whole + self.experts) + tables + self.hidden

    @classmethod
    def of(cls, folder: str | Path) -> Shape:
        """Of a checkpoint, or of its ``config.json`` alone (then transformers counts the parameters).
        Raises ConfigError: there is no such model."""
        file = Path(folder) / "config.json"
        try:
            model = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--hf-checkpoint: {file} cannot be read: {error}") from None
        model = model.get("text_config", model)
        needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        if missing := [name for name in needed if name not in model]:
            raise ConfigError(f"--hf-checkpoint: {file} does not say {', '.join(missing)}, so nothing can be planned.")
        layers, hidden = model["num_hidden_layers"], model["hidden_size"]
        counts = dict.fromkeys(("split", "whole", "experts"), 0)
        embedding, head_norms = 0, False
        for name, shape in _tensors(Path(folder)):
            if "embed_tokens" in name:
                embedding = prod(shape)
            elif ".layers." in name:
                routed = ".experts." in name
                counts["experts" if routed else "whole" if len(shape) < 2 or _router(name) else "split"] += prod(shape)
                head_norms = head_norms or "q_norm" in name
        active = model.get("num_experts_per_tok", 0) * model.get("moe_intermediate_size", model["intermediate_size"])
        return cls(
            layers=layers,
            hidden=hidden,
            heads=model["num_attention_heads"],
            groups=model.get("num_key_value_heads") or model["num_attention_heads"],
            head_dim=head_dim(model) or 0,
            ffn=active or model["intermediate_size"],
            vocab=model["vocab_size"],
            tied=bool(model.get("tie_word_embeddings", False)),
            head_norms=head_norms,
            embedding=embedding,
            latent=model.get("kv_lora_rank", 0) + model.get("qk_rope_head_dim", 0) if model.get("kv_lora_rank") else 0,
            **{kind: -(-count // layers) for kind, count in counts.items()},
        )


def _router(name: str) -> bool:
    return name.endswith(("mlp.gate.weight", "router.weight"))


def _tensors(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors; of a model without files, those that transformers would make."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        yield from ((name, tuple(tensor["shape"])) for name, tensor in header.items() if name != "__metadata__")
    if not files:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        yield from ((name, tuple(tensor.shape)) for name, tensor in model.named_parameters())


@dataclass(frozen=True)
class Memory:
    """Bytes of one trainer rank and one engine rank on their devices, and of the host beside them.

    Attributes:
        optimizer: Adam's moments, and float32 weights where training is in bf16.
        activations: at the peak of a forward and backward pass, output layer included.
        step: what Adam needs for the time of a step: on GPUs a number a parameter, for all are updated in one go; on a
            CPU two numbers a parameter of the largest tensor.
        snapshot: the published weights, once, in shared memory or on a disk.
        reference: the copies of weights that a rank swaps in and out, in host memory.
        offloaded: what a rank moves to host memory while engines have its device.
        checkpoint: what rank 0 copies of its state, and with ``--async-save`` of the whole model, until it is written;
            other ranks copy their state, one of each that hold the same.
        kv_cache: of one engine rank, for all episodes in flight at their longest.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    step: float
    engine_weights: float
    kv_cache: float
    snapshot: float
    reference: float
    checkpoint: float
    offloaded: float = 0.0

    @property
    def trainer(self) -> float:
        """The peak of a rank: activations and the optimizer's temporaries are never there together."""
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.step)

    @property
    def engine(self) -> float:
        return self.engine_weights + self.kv_cache

    def lines(self) -> list[tuple[str, str]]:
        """For a person: what, and how much in GiB."""
        return [
            (
                "a trainer rank",
                f"{in_gib(self.trainer)} = weights {in_gib(self.weights)} + gradients {in_gib(self.gradients)} + "
                f"optimizer {in_gib(self.optimizer)} + at the peak {in_gib(max(self.activations, self.step))}",
            ),
            (
                "an engine rank",
                f"{in_gib(self.engine)} = weights {in_gib(self.engine_weights)} + KV cache {in_gib(self.kv_cache)}",
            ),
            ("snapshot", f"{in_gib(self.snapshot)}, once, of the trainer's first machine"),
            *([("reference", f"{in_gib(self.reference)} of host memory a rank")] if self.reference else []),
            *([("offloaded", f"{in_gib(self.offloaded)} of host memory a rank")] if self.offloaded else []),
            *([("checkpoint", f"{in_gib(self.checkpoint)} of host memory, rank 0")] if self.checkpoint else []),
        ]


def in_gib(size: float) -> str:
    """Bytes for a person."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.1f} MiB"


def memory_of(cfg: Config, shape: Shape, device: str) -> Memory:
    """What a run of these options takes, of which batch, layout and precision are read, with a model of that shape on
    ``device`` (``cpu`` or ``cuda``)."""
    bf16 = cfg.dtype == "bf16" or (cfg.dtype == "auto" and device == "cuda")
    item = 2 if bf16 else 4
    algorithm = load_algorithm(cfg.section(AlgorithmOptions))
    dense, experts = _of_stage(cfg, shape)
    models = 2 if "values" in algorithm.needs else 1  # a critic is as large as the policy, and on the same ranks
    replicas = cfg.data_parallel_size if cfg.use_distributed_optimizer else 1
    owned = dense / replicas + experts / max(1, replicas // cfg.expert_model_parallel_size)
    engine_ranks = cfg.rollout_num_gpus_per_engine if device == "cuda" else 1
    state = models * (12 if cfg.save_optim else 4) * (dense + experts)
    exported = item * shape.parameters if cfg.async_save else 0
    longest = max(cfg.rollout_max_context_len, cfg.eval_max_context_len or 0)
    in_flight = ceil(cfg.rollout_concurrency / (cfg.rollout_num_engines or 1))
    of_layer = shape.latent or 2 * max(1, shape.groups // engine_ranks) * shape.head_dim
    weights, optimizer = models * item * (dense + experts), models * (12 if bf16 else 8) * owned
    return Memory(
        weights=weights,
        gradients=models * 4 * (dense + experts),
        optimizer=optimizer,
        activations=activations(cfg, shape, item, device),
        step=4 * owned if device == "cuda" else 8 * shape.embedding,
        engine_weights=item * shape.parameters / engine_ranks,
        kv_cache=in_flight * longest * shape.layers * of_layer * item,
        snapshot=item * shape.parameters,
        reference=2 * item * (dense + experts) if "ref" in algorithm.infers(1) else 0,
        checkpoint=state + exported if cfg.save_interval or cfg.best_metric else 0,
        offloaded=weights + optimizer if cfg.takes_turns and cfg.offload_train is not False else 0,
    )


def short_of_memory(cfg: Config, free: float) -> str | None:
    """What to know where a machine without GPUs has ``free`` bytes for a run that takes more; None otherwise."""
    memory = memory_of(cfg, Shape.of(str(cfg.hf_checkpoint)), "cpu")
    ranks, engines = cfg.world_size, cfg.rollout_num_engines or 1
    trainer = ranks * (memory.trainer + memory.reference) if cfg.trains else 0
    of_engines = engines * memory.engine if cfg.plays else 0
    needed = trainer + of_engines
    if cfg.takes_turns:  # what is offloaded stays in this memory, but for gradients and what a step needs
        away = ranks * (memory.offloaded + memory.reference) if memory.offloaded else trainer
        needed = max(trainer + (0 if cfg.offload_rollout else of_engines), away + of_engines)
    needed += memory.snapshot if cfg.plays and cfg.trains else 0
    if needed <= free:
        return None
    return (
        f"this run takes about {in_gib(needed)} of memory, and {in_gib(free)} are free: the trainer "
        f"{in_gib(memory.trainer)} a rank, {in_gib(memory.activations)} of it for packs of {cfg.max_tokens_per_gpu:,} "
        "tokens (--max-tokens-per-gpu)"
    )


def _of_stage(cfg: Config, shape: Shape) -> tuple[float, float]:
    """Parameters of the largest rank: those that it shares with its data-parallel replicas, and its experts."""
    tensor, stages = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
    layers = ceil(shape.layers / stages)
    # With one stage, two tables unless they are tied; with several, one of the first stage and one of the last.
    tables = 2 if stages == 1 and not shape.tied else 1
    dense = layers * (shape.split / tensor + shape.whole) + tables * shape.embedding / tensor + shape.hidden
    return dense, layers * shape.experts / (tensor * cfg.expert_model_parallel_size)


def activations(cfg: Config, shape: Shape, item: int, device: str) -> float:
    """Bytes that one rank keeps for the backward pass of its micro-batches in flight, and of the output layer.

    Counted over the modules of `trainer/megatron/layers.py`: inputs of the norms and of the matrix products, queries,
    keys, values, output of the attention, and what the activation function needs. No scores, no logits of all.
    """
    tensor, stages = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
    tokens = max(cfg.max_tokens_per_gpu, cfg.rollout_max_context_len)
    if not cfg.use_dynamic_batch_size:
        tokens = cfg.micro_batch_size * cfg.rollout_max_context_len
    layers = ceil(shape.layers / stages)
    residual = shape.hidden / (tensor if cfg.sequence_parallel else 1)
    a_norm, attention, mlp = _of_layer(shape, device, item)
    norms = 2 * a_norm * residual
    if cfg.megatron.get("recompute_granularity") == "full":
        of_layer, again = residual, norms + (attention + mlp) / tensor
    elif cfg.recompute_activations or "mlp" in (cfg.megatron.get("recompute_modules") or ()):
        of_layer, again = norms + attention / tensor, mlp / tensor
    else:
        of_layer, again = norms + (attention + mlp) / tensor, 0.0
    in_flight: float = min(stages, 8) if stages > 1 else 1
    if chunks := cfg.megatron.get("virtual_pipeline_model_parallel_size"):  # chunks in flight on the first stage
        in_flight = (2 * (stages - 1) + (chunks - 1) * stages + 1) / chunks
    kept = item * tokens * (in_flight * layers * of_layer + again + 3 * shape.ffn / tensor)  # and gradients of a layer
    logits = 4 * tokens * shape.vocab / tensor
    softmax = logits if is_kept(tokens, shape.vocab // tensor, device) else 0
    output = softmax + min(logits, TILE_BYTES[device]) + (4 + item) * tokens * shape.hidden
    return kept + output


def _of_layer(shape: Shape, device: str, item: int) -> tuple[float, float, float]:
    """Numbers kept of a token: of a norm (over the width of the model), of the attention, of the MLP."""
    query, key = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    if device == "cuda":  # TransformerEngine's fused modules, or torch's fused kernels
        return 2, 2 * query + 2 * key + query, 3 * shape.ffn
    in_float32 = 4 // item - 1  # in bf16 a norm keeps its input in float32
    attention = query + 2 * key  # the joint product
    attention += (query + key) * (3 + 2 * in_float32 if shape.head_norms else 1)  # rotated; and norms of heads
    attention += 2 * query if shape.heads != shape.groups else 0  # keys and values repeated for the groups
    attention += 2 * query  # output, and as the input of the projection
    return 3 + in_float32, attention, 4 * shape.ffn


@dataclass(frozen=True)
class Plan:
    """A layout with its memory on GPUs of ``gpu_bytes``."""

    config: Config
    memory: Memory
    gpu_bytes: float
    is_shared: bool = False

    @property
    def trainer_room(self) -> float:
        """Bytes of a GPU that a rank may take; where an engine shares it, what is left of a GPU beside that, or, where
        they take turns, beside what it does not give back."""
        share = share_of_engines(self.config)
        beside = RESIDUE if share == TURNS else share
        return (ROOM - beside if self.is_shared else ROOM) * self.gpu_bytes

    @property
    def engine_room(self) -> float:
        return (share_of_engines(self.config) if self.is_shared else ENGINE_ROOM) * self.gpu_bytes

    @property
    def episodes(self) -> float:
        """Episodes at their longest for which an engine has KV cache."""
        in_flight = ceil(self.config.rollout_concurrency / (self.config.rollout_num_engines or 1))
        return in_flight * (self.engine_room - self.memory.engine_weights) / self.memory.kv_cache

    @property
    def fits(self) -> bool:
        return self.memory.trainer <= self.trainer_room and self.episodes >= 1

    def flags(self) -> list[str]:
        """Options of ``agentrl train`` for this layout, beside those that were given."""
        cfg, default = self.config, Config()
        names = (
            *("actor_num_gpus_per_node", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("rollout_num_engines", "rollout_num_gpus_per_engine"),
        )
        pairs = [(name, getattr(cfg, name)) for name in names if getattr(cfg, name) != getattr(default, name)]
        words = [word for name, value in pairs for word in (f"--{name.replace('_', '-')}", str(value))]
        words += ["--use-distributed-optimizer"] if cfg.use_distributed_optimizer else []
        words += ["--sequence-parallel"] if cfg.sequence_parallel else []
        for name in _FULL:
            words += [f"--{name.replace('_', '-')}", str(cfg.megatron[name])] if name in cfg.megatron else []
        return words


_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_SIZES = (1, 2, 4, 8)


def plans(cfg: Config, shape: Shape, gpus: int, gpu_bytes: float) -> Iterator[Plan]:
    """Layouts on machines of ``gpus`` GPUs, ``--actor-num-nodes`` of them, the better ones first: the layout that was
    given, or all that the model allows.

    Better is: half of the GPUs for each side, or all of them for both with ``--colocate``, then fewer ranks to a copy
    of the model, then without computing activations twice, then smaller engines. Ranks that are replicas share the
    optimizer's state. Each machine has as many ranks as every other, and neither an engine nor a tensor-parallel group
    straddles two.
    """
    nodes = cfg.actor_num_nodes
    shared = cfg.takes_turns or gpus * nodes == 1  # then by one rank and one engine
    in_step = cfg.global_batch_size or cfg.rollout_batch_size * cfg.n_samples_per_prompt // (
        cfg.num_steps_per_rollout or 1
    )
    if cfg.actor_num_gpus_per_node is not None or cfg.model_parallel_size > 1:
        ranks = cfg.actor_num_gpus_per_node or ceil(cfg.model_parallel_size / nodes)
        layouts: list[tuple[int, int, dict]] = [
            (cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.megatron)
        ]
        sides = [ranks]
    else:
        divides = [n for n in _SIZES if shape.heads % n == 0 and shape.groups % n == 0]
        stages = [n for n in (*_SIZES, 16, 32) if shape.layers % n == 0]
        recompute = [cfg.megatron] if cfg.recompute_activations or cfg.megatron else [{}, _FULL]
        layouts = sorted(product(divides, stages, recompute), key=lambda x: (x[0] * x[1], len(x[2]), x[1]))
        sides = sorted(range(1, max(gpus, 2)), key=lambda n: (abs(2 * n - gpus), n))
        if cfg.takes_turns:
            sides = list(range(gpus, 0, -1))
    for ranks, (tensor, stages_, megatron) in product(sides, layouts):
        left = ranks if shared else gpus - ranks
        for each in _SIZES if cfg.rollout_num_gpus_per_engine == 1 else [cfg.rollout_num_gpus_per_engine]:
            room = left // each * nodes
            engines = cfg.rollout_num_engines or max(1, (cfg.rollout_num_gpus or room * each) // each)
            if cfg.rollout_num_gpus not in (None, engines * each):
                continue
            if ranks > gpus or ranks * nodes % (tensor * stages_) or ranks % tensor or room < engines:
                continue
            if shape.heads % each or shape.groups % each:
                continue
            chosen = cfg.replace(
                actor_num_gpus_per_node=ranks,
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=stages_,
                megatron=megatron,
                rollout_num_engines=engines,
                rollout_num_gpus_per_engine=each,
                use_distributed_optimizer=cfg.use_distributed_optimizer or ranks * nodes > tensor * stages_,
                # Megatron splits a mixture of experts by tensor only so.
                sequence_parallel=cfg.sequence_parallel or (tensor > 1 and shape.experts > 0),
            )
            if chosen.data_parallel_size > in_step:  # each needs an episode a step
                continue
            yield Plan(chosen, memory_of(chosen, shape, "cuda"), gpu_bytes, shared)
