"""Tiny random checkpoints and batches of random samples."""

from __future__ import annotations

import socket

import numpy as np

from agentrl.trainer.batch import TrainBatch, TrainSample

VOCAB = 512


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


def tiny_checkpoint(path, kind="qwen3", *, dtype="float32", **changes):
    """Write a random checkpoint of a small model of this architecture; returns its path as text."""
    import torch
    import transformers

    sizes = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    if kind != "qwen2":
        sizes["head_dim"] = 16
    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
    config = getattr(transformers, names[kind] + "Config")(**{**sizes, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Norms and biases away from their neutral values, so that a mix-up of them shows.
            p.normal_(1.0, 0.1) if "norm" in name else p.normal_(0.0, 0.08)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return str(path)


def random_batch(n=12, *, seed=0, low=8, high=60, vocab=VOCAB, groups=3, segments=1) -> TrainBatch:
    """Samples with a prompt, then alternating sampled and environment tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        length = int(rng.integers(low, high))
        mask = (rng.random(length) < 0.6).astype(np.uint8)
        mask[: max(1, length // 4)] = 0
        mask[-1] = 1
        samples.append(
            TrainSample(
                tokens=rng.integers(0, vocab, length).astype(np.int32),
                loss_mask=mask,
                logprobs=(mask * rng.normal(-6.2, 0.3, length)).astype(np.float32),
                advantages=(mask * rng.normal()).astype(np.float32),
                versions=np.where(mask, 1, -1).astype(np.int32),
                trajectory_id=f"t{i // segments}",
                group_id=f"g{i % groups}",
                segment=i % segments,
            )
        )
    return TrainBatch.from_samples(samples)
