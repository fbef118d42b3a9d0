"""Tiny random checkpoints and batches of random samples."""

from __future__ import annotations

import dataclasses
import socket

import numpy as np

from agentrl.algorithms import TrainBatch, load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.types import Group, Segment, Task, Trajectory

VOCAB = 512
TASK = Task("task", 0)
QUIET = {"logprob_abs_diff_stop": 0.0}
"""No engine sampled the random batches: their log-probabilities agree with nobody's."""


def listen() -> socket.socket:
    """A loopback socket that already listens, so that nobody can take its port before rank 0 uses it."""
    return socket.create_server(("127.0.0.1", 0))


def join(rank: int, world_size: int, listener: socket.socket, checkpoint: str, options):
    """A trainer that meets the other ranks at ``listener``, of which every rank holds a copy."""
    from agentrl.trainer.megatron.trainer import MegatronTrainer

    port = listener.getsockname()[1]
    if rank:
        listener.close()
    return MegatronTrainer(
        rank, world_size, f"tcp://127.0.0.1:{port}", checkpoint, options, listener=None if rank else listener
    )


_SIGMOID = {
    "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
_SOFTMAX = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
MIXTURES = {
    "qwen3_moe": {**_SOFTMAX, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {**_SOFTMAX, "shared_expert_intermediate_size": 96},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_SIGMOID, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {
        **_SIGMOID, "n_group": 4, "topk_group": 2, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Sizes of tiny mixtures of experts, by ``model_type``."""


def tiny_checkpoint(path, kind="qwen3", *, dtype="float32", **changes):
    """Write a random checkpoint of a small model of this architecture; returns its path as text."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    if kind not in ("qwen2", "deepseek_v3"):
        sizes["head_dim"] = 16
    sizes |= MIXTURES.get(kind, {})
    config = CONFIG_MAPPING[kind](**{**sizes, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Norms and biases away from their neutral values, so that a mix-up of them shows.
            p.normal_(1.0, 0.1) if "norm" in name else p.normal_(0.0, 0.08)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(0.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return str(path)


def random_batch(n=12, *, seed=0, low=8, high=60, vocab=VOCAB, groups=3, segments=1) -> TrainBatch:
    """Sequences with a prompt, then alternating sampled and environment tokens, and random advantages."""
    rng = np.random.default_rng(seed)
    trajectories, advantages = [], []
    for i in range(n):
        length = int(rng.integers(low, high))
        mask = (rng.random(length) < 0.6).astype(np.uint8)
        mask[: max(1, length // 4)] = 0
        mask[-1] = 1
        segment = Segment(
            tokens=rng.integers(0, vocab, length).astype(np.int32),
            loss_mask=mask,
            logprobs=(mask * rng.normal(-6.2, 0.3, length)).astype(np.float32),
            versions=np.where(mask, 1, -1).astype(np.int32),
            prompt_length=length // 4,
        )
        advantages.append((mask * rng.normal()).astype(np.float32))
        if i % segments:
            trajectories[-1].segments.append(segment)
        else:
            reward = float(i % 4)
            trajectories.append(Trajectory(f"t{i // segments}", f"g{i % groups}", TASK, [segment], [], reward=reward))
    batch = batch_of(trajectories)
    return batch.with_columns(advantage=np.concatenate(advantages), old=batch["rollout"])


def batch_of(trajectories) -> TrainBatch:
    """All of these trajectories."""
    return TrainBatch.from_groups([Group("g", TASK, trajectories)], {t.trajectory_id for t in trajectories})


def credited(groups, algorithm=None) -> TrainBatch:
    """The batch of these groups with its credit, by GRPO unless told otherwise."""
    algorithm = algorithm or load_algorithm(AlgorithmOptions())
    batch = TrainBatch.from_groups(groups, algorithm.select(groups))
    return batch.with_columns(**algorithm.prepare(batch))


def fresh(batch) -> TrainBatch:
    """The batch without old log-probabilities: the model as it stands is the old policy."""
    return dataclasses.replace(batch, columns={n: v for n, v in batch.columns.items() if n != "old"})


def train(trainer, batch, num_steps=1):
    """What a step of the training loop does with a batch that has its advantages; metrics."""
    if not trainer.options.use_rollout_logprobs:
        batch = fresh(batch)
    names = [n for n in trainer.algorithm.infers(batch.steps(num_steps)) if n not in batch.columns]
    batch = batch.with_columns(**trainer.infer(batch, names))
    if "values" in batch.columns:
        batch = batch.with_columns(returns=batch["values"] + batch["advantage"])
    return trainer.update(batch, num_steps=num_steps)[0]


def log_probs(trainer, batch, which="old"):
    """float32[T] under the live weights or those of the reference."""
    return trainer.infer(batch, [which])[which]
