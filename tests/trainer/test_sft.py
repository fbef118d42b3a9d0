"""Supervised fine-tuning in the trainer: the loss against torch's cross entropy in float64, and its steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from agentrl.algorithms import load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.trainer.losses import MISMATCH
from tests.trainer.samples import random_batch

SFT = {"loss_type": "sft_loss"}


def written(n=8, **how):
    """A batch as written conversations give it: no column of an engine, credit by the algorithm."""
    batch = dataclasses.replace(random_batch(n, **how), columns={})
    return batch.with_columns(**load_algorithm(AlgorithmOptions(loss_type="sft_loss")).prepare(batch))


def cross_entropy(checkpoint, batch):
    """Mean over the learned tokens, float64, and the norm of its gradient."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    labels = np.where(batch.loss_mask == 1, batch.tokens, -100)
    cuts = np.cumsum(batch.lengths)[:-1]
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, label in zip(np.split(batch.tokens, cuts), np.split(labels, cuts), strict=True):
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0]
        wanted = torch.from_numpy(label[1:]).long()
        loss = loss + torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="sum")
    loss = loss / batch.num_sampled
    loss.backward()
    return loss.item(), torch.sqrt(sum((p.grad**2).sum() for p in model.parameters())).item()


@pytest.mark.parametrize("room", [10_000, 70])
def test_loss_and_gradient_are_those_of_cross_entropy_in_float64(make_trainer, checkpoint, room):
    batch = written(segments=2)
    metrics, _ = make_trainer(**SFT, clip_grad=0.0, max_tokens_per_gpu=room).update(batch)
    loss, norm = cross_entropy(checkpoint, batch)
    assert [metrics["train/loss"], metrics["train/nll"]] == pytest.approx([loss, loss], rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["train/sampled_tokens"] == batch.num_sampled
    assert not {*MISMATCH, "train/ppo_kl", "train/entropy"} & set(metrics)


def test_steps_make_what_is_learned_likelier_and_no_engine_is_agreed_with(make_trainer):
    trainer, batch = make_trainer(**SFT, logprob_abs_diff_stop=1e-9), written()
    losses = [trainer.update(batch, num_steps=2)[0]["train/loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
