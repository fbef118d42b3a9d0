"""When engine and trainer do not compute the same policy."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentrl.config import Config, load_config
from agentrl.errors import DisagreementError
from agentrl.trainer.agreement import LARGEST, MEAN, AgreementWatch, Bounds
from agentrl.trainer.megatron.options import TrainerOptions
from tests.trainer.samples import random_batch


def config(dtype="auto", warn=None, stop=None):
    return SimpleNamespace(dtype=dtype, logprob_abs_diff_warn=warn, logprob_abs_diff_stop=stop)


def test_bounds_follow_the_precision_unless_given():
    assert Bounds.of(config(), gpu=False) == Bounds.of(config("fp32"), gpu=True) == Bounds(1e-3, 1e-2)
    assert Bounds.of(config(), gpu=True) == Bounds.of(config("bf16"), gpu=False) == Bounds(0.03, 0.1)
    assert Bounds.of(config(warn=0.5, stop=0.0), gpu=True) == Bounds(0.5, 0.0)


def test_a_rise_is_told_once():
    watch = AgreementWatch(0.1)
    told = [watch.warning(n, {MEAN: m, LARGEST: 1.0}) for n, m in enumerate([0.0, 0.2, 0.3, 0.1, float("nan"), 0.2])]
    assert [bool(text) for text in told] == [False, True, False, False, True, False]
    assert "at step 1 " in told[1] and "0.2 nats" in told[1] and "--logprob-abs-diff-warn 0.1" in told[1]
    assert AgreementWatch(0.0).warning(1, {MEAN: 9.0, LARGEST: 9.0}) is None


def test_a_batch_of_another_model_is_not_trained_on(make_trainer):
    trainer, batch = make_trainer(logprob_abs_diff_stop=0.01), random_batch(6)
    before = {name: tensor.clone() for name, tensor in trainer.export()}
    with pytest.raises(DisagreementError, match=r"differ by .* nats .* more than --logprob-abs-diff-stop 0.01"):
        trainer.train(batch, num_steps=2)
    assert trainer.steps_done == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export())


def test_its_own_log_probabilities_are_trained_on_whatever_the_later_steps_do(make_trainer):
    trainer, batch = make_trainer(logprob_abs_diff_stop=1e-4, lr=0.01), random_batch(6)
    values = trainer.log_probs(batch)
    batch = dataclasses.replace(batch, logprobs=values)
    report = trainer.train(batch, num_steps=2)
    assert report[MEAN] < 1e-5 and trainer.steps_done == 2
    # The second step's weights had moved: its difference is no disagreement.
    assert np.abs(trainer.log_probs(batch) - values).max() > 1e-2


def test_every_option_of_the_trainer_can_be_set():
    """An option that no flag sets would be dead: these follow from the run, are Megatron's, or are for all."""
    names = {field.name for field in dataclasses.fields(TrainerOptions)} - {f.name for f in dataclasses.fields(Config)}
    assert names == {"adam_eps", "timeout_s", "temperature", "lr_decay_steps"}
    options = TrainerOptions.from_config(load_config(["--env", "search", "--no-use-rollout-logprobs"]))
    assert not options.use_rollout_logprobs
