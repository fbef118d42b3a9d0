"""Loss terms and their gradients against a direct float64 reference written from the equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import ALGORITHMS, load_algorithm
from agentrl.algorithms.cispo import CISPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.kl import kl_estimate
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError
from agentrl.trainer.batch import micro_batch
from agentrl.trainer.losses import Loss, Term, Tokens, kl, metrics_of
from tests.trainer.samples import random_batch

N = 200
KL_TYPES = ("k2", "k3", "low_var_kl")


def loss_of(options, algorithm=GRPO):
    return Loss(algorithm(options), options)


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
    lo, hi = options.eps_clip, options.eps_clip_high or options.eps_clip
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
    options = AlgorithmOptions(
        eps_clip=0.2, eps_clip_high=high, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kind, entropy_coef=0.05
    )
    t = {k: torch.tensor(v, dtype=torch.float64) for k, v in x.items()}
    t["lp"].requires_grad_()
    columns = {"advantage": t["adv"], "old": t["old"], "rollout": t["rollout"], "ref": t["ref"]}
    loss_ = loss_of(options)
    columns["weight"] = torch.ones(N).double()
    total, sums, largest = loss_(Tokens(t["lp"], t["entropy"], columns))
    assert list(sums) == loss_.names({name: values.numpy() for name, values in columns.items()})
    total.backward()
    loss, grad = reference(x, options)
    assert total.item() == pytest.approx(loss, rel=1e-10)
    assert np.abs(t["lp"].grad.numpy() - grad).max() < 1e-12
    metrics = metrics_of({name: float(value) for name, value in sums.items()}, float(largest), N)
    d = x["lp"] - x["rollout"]
    assert metrics["train/loss"] == pytest.approx(loss / N)
    assert metrics["train/logprob_abs_diff_mean"] == pytest.approx(np.abs(d).mean())
    assert metrics["train/logprob_abs_diff_max"] == pytest.approx(np.abs(d).max())
    assert metrics["train/rollout_kl"] == pytest.approx((np.exp(d) - 1 - d).mean())
    w = np.exp(d)
    assert metrics["train/ess"] == pytest.approx(w.sum() ** 2 / (N * (w**2).sum()))
    assert metrics["train/ppo_kl"] == pytest.approx((x["old"] - x["lp"]).mean())
    assert metrics["train/sampled_tokens"] == N


def test_cispo_equals_the_papers_equation():
    """MiniMax-M1, arXiv:2506.13585, equations 4 and 5: sg(clip(ratio)) * A * log pi."""
    x, options = inputs(), AlgorithmOptions(advantage_estimator="cispo", eps_clip=0.2, eps_clip_high=0.3)
    t = {k: torch.tensor(v, dtype=torch.float64) for k, v in x.items()}
    t["lp"].requires_grad_()
    columns = {"advantage": t["adv"], "old": t["old"], "rollout": t["rollout"], "weight": torch.ones(N).double()}
    total, sums, _ = loss_of(options, CISPO)(Tokens(t["lp"], None, columns))
    total.backward()
    weight = [min(max(np.exp(a - b), 0.8), 1.3) for a, b in zip(x["lp"], x["old"], strict=True)]
    assert total.item() == pytest.approx(sum(-w * a * lp for w, a, lp in zip(weight, x["adv"], x["lp"], strict=True)))
    assert np.abs(t["lp"].grad.numpy() + np.array(weight) * x["adv"]).max() < 1e-12
    outside = [not 0.8 <= np.exp(a - b) <= 1.3 for a, b in zip(x["lp"], x["old"], strict=True)]
    assert float(sums["clip_fraction"]) == sum(outside) > 0


def test_dual_clip_equals_the_papers_equation():
    """Ye et al., arXiv:1912.09729, equation 5: max(min(ratio A, clip(ratio) A), c A) where A < 0."""
    x, options = inputs(), AlgorithmOptions(eps_clip=0.2, eps_clip_c=1.3)
    x["lp"] += 0.4  # ratios above c are there
    t = {k: torch.tensor(v, dtype=torch.float64) for k, v in x.items()}
    t["lp"].requires_grad_()
    columns = {"advantage": t["adv"], "old": t["old"], "rollout": t["rollout"], "weight": torch.ones(N).double()}
    total, sums, _ = loss_of(options)(Tokens(t["lp"], None, columns))
    total.backward()
    loss, limited, plain = 0.0, [], []
    for lp, old, a in zip(x["lp"], x["old"], x["adv"], strict=True):
        ratio = np.exp(lp - old)
        clipped = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        loss -= max(clipped, 1.3 * a) if a < 0 else clipped
        limited.append(a < 0 and clipped < 1.3 * a)
        plain.append(min(max(ratio, 0.8), 1.2) * a < ratio * a)
    assert total.item() == pytest.approx(loss, rel=1e-10)
    assert any(limited) and not t["lp"].grad[torch.tensor(limited)].any()
    assert float(sums["clip_fraction"]) == sum(a or b for a, b in zip(limited, plain, strict=True))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_form_has_the_divergences_own_gradient_off_policy_too(kind):
    """DeepSeek-V3.2, arXiv:2512.02556, section 3.1: the estimate times pi / pi_old, in the mean over pi_old. Exact,
    over a whole vocabulary."""
    torch.manual_seed(0)
    logits = torch.randn(20, dtype=torch.float64, requires_grad=True)
    old, ref = (torch.randn(20, dtype=torch.float64).log_softmax(0) for _ in range(2))
    options = AlgorithmOptions(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=True)
    term = kl(Tokens(logits.log_softmax(0), None, {"old": old, "ref": ref}), options)
    value = (old.exp() * term.values).sum()
    ours = torch.autograd.grad(value, logits)[0]
    p = logits.log_softmax(0)
    true = (p.exp() * (p - ref)).sum()
    assert value.item() == pytest.approx(true.item())
    assert torch.allclose(ours, torch.autograd.grad(true, logits)[0])


def own_policy_term(tokens, options):
    """A loss of one's own, by path: minus the advantage times the log-probability."""
    return Term("reinforce", -tokens["advantage"] * tokens.logprobs)


def test_a_custom_loss_stands_in_the_place_of_the_policy_term():
    t = {k: torch.tensor(v) for k, v in inputs().items()}
    columns = {"advantage": t["adv"], "old": t["old"], "rollout": t["rollout"], "ref": t["ref"]}
    columns["weight"] = torch.full((N,), 1 / N, dtype=torch.float64)
    path = f"{__file__}:own_policy_term"
    options = AlgorithmOptions(use_kl_loss=True, kl_loss_coef=0.5, custom_loss_function_path=path)
    _, sums, _ = loss_of(options)(Tokens(t["lp"], None, columns))
    assert "pg_loss" not in sums
    assert float(sums["reinforce"]) == pytest.approx(float(-(t["adv"] * t["lp"]).mean()))
    assert float(sums["loss"]) == pytest.approx(float(sums["reinforce"] + 0.5 * sums["kl_loss"]))


def test_low_var_kl_limits_odd_tokens():
    lp, ref = torch.tensor([-40.0, -1.0]), torch.tensor([0.0, -1.0])
    assert kl_estimate(lp - ref, "low_var_kl", torch.expm1).tolist() == [10.0, 0.0]
    assert torch.isfinite(kl_estimate(torch.tensor([-900.0]), "low_var_kl", torch.expm1)).all()


def test_the_k3_estimate_is_the_divergence_in_the_mean():
    torch.manual_seed(0)
    p, q = torch.randn(50).log_softmax(0), torch.randn(50).log_softmax(0)
    true = (p.exp() * (p - q)).sum()
    assert (p.exp() * kl_estimate(p - q, "k3", torch.expm1)).sum() == pytest.approx(float(true), abs=1e-5)


@pytest.mark.parametrize("kind", KL_TYPES)
def test_every_estimate_pulls_towards_the_reference_in_expectation(kind):
    """As a loss on samples of the policy; k1 would not: its expected gradient is 0."""
    torch.manual_seed(0)
    logits, q = torch.randn(20, requires_grad=True), torch.randn(20).log_softmax(0)
    p = logits.log_softmax(0)
    (p.detach().exp() * kl_estimate(p - q, kind, torch.expm1)).sum().backward()
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
    none = torch.zeros(0)
    columns = dict.fromkeys(("advantage", "old", "rollout", "weight"), none)
    total, sums, largest = loss_of(AlgorithmOptions())(Tokens(none, None, columns))
    assert (float(total), sum(map(float, sums.values())), float(largest)) == (0.0, 0.0, 0.0)


def test_a_correction_is_a_factor_of_the_policy_term_alone():
    x = {k: torch.tensor(v) for k, v in inputs().items()}
    columns = {"advantage": x["adv"], "old": x["old"], "rollout": x["rollout"], "ref": x["ref"]}
    columns["weight"] = torch.full((N,), 1 / N, dtype=torch.float64)
    loss = loss_of(AlgorithmOptions(use_kl_loss=True))
    plain = loss(Tokens(x["lp"], None, columns))[1]
    masked = loss(Tokens(x["lp"], None, {**columns, "correction": torch.zeros(N)}))[1]
    assert (float(masked["pg_loss"]), masked["kl_loss"]) == (0.0, plain["kl_loss"])


def test_missing_inputs_and_unknown_terms_are_errors():
    x = torch.zeros(1)
    columns = {"advantage": x, "old": x, "rollout": x, "weight": x}
    with pytest.raises(ConfigError, match="'ref'"):
        loss_of(AlgorithmOptions(use_kl_loss=True))(Tokens(x, None, columns))
    with pytest.raises(ConfigError, match="entropy"):
        loss_of(AlgorithmOptions(entropy_coef=0.1))(Tokens(x, None, columns))
    with pytest.raises(ConfigError, match="k4.*not one of k1"):
        kl_estimate(x, "k4", torch.expm1)

    class Odd(GRPO):
        terms = ("cliped_surrogate",)

    with pytest.raises(ConfigError, match="'cliped_surrogate' is neither one of clipped_surrogate"):
        loss_of(AlgorithmOptions(), Odd)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 999))
def test_how_a_step_is_cut_and_what_is_masked_does_not_change_the_loss(name, seed):
    """The loss is a sum over micro-batches, whatever the cut, the order, and whatever stands at masked tokens."""
    rng = np.random.default_rng(seed)
    options = AlgorithmOptions(
        advantage_estimator=name, use_rollout_logprobs=False, use_kl_loss=True, kl_loss_coef=0.1, kl_coef=0.05,
        use_tis=True, tis_level="geometric", use_rs=True, overlong_handling="mask", loss_scale_factor=40,
        use_opsm=True,
    )  # fmt: skip
    algorithm, batch = load_algorithm(options), random_batch(8, seed=seed, segments=2, groups=1)

    def near():
        return (batch["rollout"] + rng.normal(0, 0.1, batch.num_tokens)).astype(np.float32)

    batch = batch.with_columns(old=near(), ref=near(), current=near(), values=near())
    dirty = {key: np.where(batch.loss_mask == 1, batch[key], 9.0).astype(np.float32) for key in ("old", "ref")}

    def loss_and_gradient(batch, cut):
        batch = batch.with_columns(**algorithm.prepare(batch))
        columns = {"weight": algorithm.aggregate(batch, range(len(batch))), **algorithm.in_step(batch)}
        batch, total, gradient = batch.with_columns(**columns), 0.0, np.zeros(batch.num_tokens)
        for samples in cut:
            micro = micro_batch(batch, samples)
            tensors = {key: torch.tensor(values) for key, values in micro.columns.items()}
            logprobs = tensors["current"].double().requires_grad_()
            loss, _, _ = Loss(algorithm, options)(Tokens(logprobs, None, tensors))
            loss.backward()
            total, gradient[micro.at] = total + loss.item(), logprobs.grad.numpy()
        return total, gradient

    order = rng.permutation(len(batch)).tolist()
    whole, expected = loss_and_gradient(batch, [range(len(batch))])
    for other, cut in ((batch, [[n] for n in order]), (batch, [order[:3], [], order[3:]]), (dirty, [order])):
        other = other if other is batch else batch.with_columns(**dirty)
        total, gradient = loss_and_gradient(other, cut)
        assert total == pytest.approx(whole, rel=1e-6, abs=1e-9)
        assert np.allclose(gradient, expected, rtol=1e-5, atol=1e-9)
        assert not gradient[batch.loss_mask == 0].any()
