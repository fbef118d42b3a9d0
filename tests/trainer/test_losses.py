"""Loss terms and their gradients against a direct float64 reference written from the equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.trainer.losses import KL_TYPES, SUMS, LossOptions, kl_estimate, metrics_from_sums, token_loss

N = 200


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    lp = rng.normal(-3, 1, N)
    return {
        "lp": lp,
        "old": lp + rng.normal(0, 0.3, N),
        "rollout": lp + rng.normal(0, 0.1, N),
        "ref": lp + rng.normal(0, 0.5, N),
        "adv": rng.normal(0, 1, N),
        "entropy": rng.uniform(0, 5, N),
    }


def reference(x, options):
    """Loss sum and d loss / d lp in float64, written out case by case."""
    lo, hi = options.eps_clip, options.clip_high
    loss, grad = 0.0, np.zeros(N)
    for i in range(N):
        ratio, a = np.exp(x["lp"][i] - x["old"][i]), x["adv"][i]
        clipped = min(max(ratio, 1 - lo), 1 + hi)
        loss += -min(ratio * a, clipped * a)
        if ratio * a <= clipped * a:
            grad[i] += -ratio * a
        d = x["lp"][i] - x["ref"][i]
        kl, dkl = {
            "k2": (d * d / 2, d),
            "k3": (np.exp(-d) - 1 + d, 1 - np.exp(-d)),
            "low_var_kl": (np.exp(-d) - 1 + d, 1 - np.exp(-d)),
        }[options.kl_loss_type]
        loss += options.kl_loss_coef * kl
        grad[i] += options.kl_loss_coef * dkl
    return loss - options.entropy_coef * x["entropy"].sum(), grad


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("high", [None, 0.28])
def test_loss_and_gradient_equal_the_float64_reference(kind, high):
    x = inputs()
    options = LossOptions(eps_clip=0.2, eps_clip_high=high, kl_loss_coef=0.3, kl_loss_type=kind, entropy_coef=0.05)
    t = {k: torch.tensor(v, dtype=torch.float64) for k, v in x.items()}
    t["lp"].requires_grad_()
    total, sums, largest = token_loss(
        t["lp"], t["entropy"], advantages=t["adv"], old_logprobs=t["old"], rollout_logprobs=t["rollout"],
        ref_logprobs=t["ref"], options=options,
    )  # fmt: skip
    total.backward()
    loss, grad = reference(x, options)
    assert total.item() == pytest.approx(loss, rel=1e-10)
    assert np.abs(t["lp"].grad.numpy() - grad).max() < 1e-12
    metrics = metrics_from_sums(dict(zip(SUMS, sums.tolist(), strict=True)), float(largest))
    d = x["lp"] - x["rollout"]
    assert metrics["train/loss"] == pytest.approx(loss / N)
    assert metrics["train/logprob_abs_diff_mean"] == pytest.approx(np.abs(d).mean())
    assert metrics["train/logprob_abs_diff_max"] == pytest.approx(np.abs(d).max())
    assert metrics["train/rollout_kl"] == pytest.approx((np.exp(d) - 1 - d).mean())
    w = np.exp(d)
    assert metrics["train/ess"] == pytest.approx(w.sum() ** 2 / (N * (w**2).sum()))
    assert metrics["train/ppo_kl"] == pytest.approx((x["old"] - x["lp"]).mean())
    assert metrics["train/sampled_tokens"] == N


def test_low_var_kl_limits_odd_tokens():
    lp, ref = torch.tensor([-40.0, -1.0]), torch.tensor([0.0, -1.0])
    assert kl_estimate(lp, ref, "low_var_kl").tolist() == [10.0, 0.0]
    assert torch.isfinite(kl_estimate(torch.tensor([-900.0]), torch.tensor([0.0]), "low_var_kl")).all()


def test_the_k3_estimate_is_the_divergence_in_the_mean():
    torch.manual_seed(0)
    p, q = torch.randn(50).log_softmax(0), torch.randn(50).log_softmax(0)
    true = (p.exp() * (p - q)).sum()
    assert (p.exp() * kl_estimate(p, q, "k3")).sum() == pytest.approx(float(true), abs=1e-5)


@pytest.mark.parametrize("kind", KL_TYPES)
def test_every_estimate_pulls_towards_the_reference_in_expectation(kind):
    """As a loss on samples of the policy; k1 would not: its expected gradient is 0."""
    torch.manual_seed(0)
    logits, q = torch.randn(20, requires_grad=True), torch.randn(20).log_softmax(0)
    p = logits.log_softmax(0)
    (p.detach().exp() * kl_estimate(p, q, kind)).sum().backward()
    ours, logits.grad = logits.grad, None
    p = logits.log_softmax(0)
    (p.exp() * (p - q)).sum().backward()
    assert torch.cosine_similarity(ours, logits.grad, dim=0) > 0.5
    assert kl_k1_gradient(logits.detach()).norm() < 1e-6


def kl_k1_gradient(logits):
    logits = logits.clone().requires_grad_()
    p = logits.log_softmax(0)
    (p.detach().exp() * p).sum().backward()
    return logits.grad


def test_an_empty_micro_batch_has_zero_loss():
    empty = torch.zeros(0)
    total, sums, largest = token_loss(
        empty, None, advantages=empty, old_logprobs=empty, rollout_logprobs=empty, ref_logprobs=empty,
        options=LossOptions(),
    )  # fmt: skip
    assert (float(total), float(sums.abs().sum()), float(largest)) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "kwargs", [{"kl_loss_type": "k1"}, {"eps_clip": 0.0}, {"eps_clip": 1.5}, {"eps_clip_high": -0.1}]
)
def test_wrong_options_name_their_flags(kwargs):
    with pytest.raises(ConfigError, match="--"):
        LossOptions(**kwargs)


def test_missing_inputs_are_errors():
    x = torch.zeros(1)
    arrays = dict(advantages=x, old_logprobs=x, rollout_logprobs=x, ref_logprobs=None)
    with pytest.raises(ConfigError, match="reference"):
        token_loss(x, None, options=LossOptions(kl_loss_coef=0.1), **arrays)
    with pytest.raises(ConfigError, match="entropy"):
        token_loss(x, None, options=LossOptions(entropy_coef=0.1), **arrays)
