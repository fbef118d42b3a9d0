"""When engine and trainer do not compute the same policy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentrl.errors import DisagreementError
from agentrl.trainer.agreement import LARGEST, MEAN, AgreementWatch, Bounds, by_age
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


def test_the_difference_is_measured_by_the_age_of_the_weights():
    batch, rng = random_batch(6), np.random.default_rng(3)
    ages = (batch.sequence * 2 * batch.loss_mask).astype(np.int32)  # 0, 2, 4, 6, 8, 10 versions
    current = batch["rollout"] + rng.normal(0, 0.1, batch.num_tokens).astype(np.float32) * (1 + ages)
    metrics = by_age(batch.with_columns(age=ages), current, [0, 1, 3, 4])
    sampled, of_step = batch.loss_mask == 1, np.isin(batch.sequence, [0, 1, 3, 4])
    assert metrics["train/age_mean"] == pytest.approx(ages[sampled & of_step].mean())
    for age, sequences in ((0, [0]), (2, [1]), (4, [3, 4])):  # 4 and older
        d = (current - batch["rollout"])[sampled & np.isin(batch.sequence, sequences)].astype(np.float64)
        w = np.exp(d)
        expected = {
            "logprob_abs_diff_mean": np.abs(d).mean(), "rollout_kl": (w - 1 - d).mean(),
            "ess": w.sum() ** 2 / (len(d) * (w**2).sum()), "sampled_tokens": len(d),
        }  # fmt: skip
        for name, value in expected.items():
            assert metrics[f"train/{name}/age_{age}"] == pytest.approx(value, rel=1e-5)
    assert len(metrics) == 1 + 3 * 4


def test_a_slow_rise_below_the_bound_is_told_once_for_each_doubling():
    watch = AgreementWatch(0.1)
    values = [0.005] * 8 + [0.02] * 12 + [0.021] * 10 + [0.06] * 8 + [0.06] * 20
    told = [watch.warning(n, {MEAN: m, LARGEST: 1.0}) for n, m in enumerate(values)]
    texts = [text for text in told if text]
    assert len(texts) == 2 and "drift apart" in texts[0]
    assert "0.0125 nats in the mean of 8 steps, and by 0.005 before" in texts[0]
    rounding = AgreementWatch(0.1)  # 1e-6 to 1e-5 nats is no trend
    assert watch.warning(99, {}) is None  # a step without the policy is no fall to 0
    assert not any(rounding.warning(n, {MEAN: 1e-6 * n, LARGEST: 1.0}) for n in range(50))
