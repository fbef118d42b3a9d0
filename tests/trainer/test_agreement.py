"""When engine and trainer do not compute the same policy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentrl.errors import DisagreementError
from agentrl.trainer.agreement import LARGEST, MEAN, AgreementWatch, Bounds
from tests.trainer.samples import log_probs, random_batch, train


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
        train(trainer, batch, 2)
    assert trainer.policy.core.steps_done == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export())


def test_its_own_log_probabilities_are_trained_on_whatever_the_later_steps_do(make_trainer):
    trainer, batch = make_trainer(logprob_abs_diff_stop=1e-4, lr=0.01), random_batch(6)
    values = log_probs(trainer, batch)
    batch = batch.with_columns(rollout=values, old=values)
    report = train(trainer, batch, 2)
    assert report[MEAN] < 1e-5 and trainer.policy.core.steps_done == 2
    # The second step's weights had moved: its difference is no disagreement.
    assert np.abs(log_probs(trainer, batch) - values).max() > 1e-2
