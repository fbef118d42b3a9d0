"""Corrections for tokens of another policy, against references written out token by token in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import load_algorithm
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.importance import correction_metrics
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError
from tests.algorithms.samples import batch_of, noisy, segment, trajectory

LEVELS = ("token", "sequence", "geometric")
BOUNDS = {"token": (0.8, 1.25), "sequence": (0.4, 2.5), "geometric": (0.9, 1.1)}


@pytest.fixture
def batch():
    lengths = [[2, 3], [1], [4, 4, 2]]
    members = [trajectory(f"t{n}", [0.0] * (len(own) - 1) + [n], turns=own) for n, own in enumerate(lengths)]
    members.append(trajectory("cut", [1.0], segments=[segment([3]), segment([2])]))
    return noisy(batch_of(members), scale=0.3)


def algorithm(**options):
    options = {"use_rollout_logprobs": False, **options}
    return load_algorithm(AlgorithmOptions(**options))


def ratios(batch, level):
    """Trainer ÷ engine of each token, of its trajectory (the product), or the geometric mean over its tokens."""
    found = np.ones(batch.num_tokens)
    for n in range(batch.num_trajectories):
        own = [t for t in range(batch.num_tokens) if batch.trajectory[t] == n and batch.loss_mask[t]]
        logs = [float(batch["old"][t]) - float(batch["rollout"][t]) for t in own]
        for t, log in zip(own, logs, strict=True):
            found[t] = math.exp({"token": log, "sequence": math.fsum(logs)}.get(level, math.fsum(logs) / len(logs)))
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_equal_the_reference(batch, level, mode):
    """Truncated importance sampling, min(max(w, low), high); IcePop, w within the bounds and 0 outside."""
    low, high = BOUNDS[level]
    options = {"use_tis": True, "tis_mode": mode, "tis_level": level, "tis_clip": high, "tis_clip_low": low}
    columns = algorithm(**options).prepare(batch)
    expected = [
        0.0 if not sampled else min(max(w, low), high) if mode == "truncate" else w if low <= w <= high else 0.0
        for w, sampled in zip(ratios(batch, level), batch.loss_mask, strict=True)
    ]
    assert columns["correction"].tolist() == pytest.approx(expected, rel=1e-6)
    metrics = algorithm(**options).metrics(batch.with_columns(**columns))
    sampled = batch.loss_mask == 1
    outside = (ratios(batch, level) < low) | (ratios(batch, level) > high)
    assert metrics["train/tis_mean"] == pytest.approx(columns["correction"][sampled].mean())
    assert metrics["train/tis_clipped"] == pytest.approx(outside[sampled].mean())
    assert 0 < outside[sampled].mean() < 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_trajectory_is_accepted_or_rejected_as_a_whole(batch, level):
    low, high = 0.7, 1.4
    options = {"use_rs": True, "rs_level": level, "rs_lower_bound": low, "rs_upper_bound": high}
    columns = algorithm(**options).prepare(batch)
    found = ratios(batch, level)
    fits = [
        all(low <= found[t] <= high for t in np.flatnonzero(batch.loss_mask) if batch.trajectory[t] == n)
        for n in range(batch.num_trajectories)
    ]
    assert batch.means(columns["correction"]).tolist() == [float(fit) for fit in fits]
    assert correction_metrics(batch, algorithm(**options).options)["train/rs_rejected"] == 1 - np.mean(fits)


def test_rejection_and_weights_go_together_and_leave_the_counts_of_the_loss(batch):
    both = algorithm(use_tis=True, use_rs=True, rs_lower_bound=0.0, rs_upper_bound=1e-9)
    columns = both.prepare(batch)
    assert not columns["correction"].any()
    whole = batch.with_columns(**columns)
    assert both.aggregate(whole, range(len(batch))).sum() == pytest.approx(1)
    assert both.infers(1) == ("old",)


def test_on_policy_every_weight_is_one(batch):
    same = batch.with_columns(old=batch["rollout"])
    for level in LEVELS:
        values = algorithm(use_tis=True, tis_level=level, use_rs=True, rs_level=level).prepare(same)["correction"]
        assert (values == same.loss_mask).all()
    assert "correction" not in algorithm().prepare(batch)


def opsm_reference(batch, delta):
    """DeepSeek-V3.2, arXiv:2512.02556, section 3.1: M of each sampled token, token by token in float64."""
    found = []
    for t in np.flatnonzero(batch.loss_mask):
        own = [s for s in np.flatnonzero(batch.loss_mask) if batch.trajectory[s] == batch.trajectory[t]]
        apart = math.fsum(float(batch["rollout"][s]) - float(batch["current"][s]) for s in own) / len(own)
        found.append(0.0 if batch["advantage"][t] < 0 and apart > delta else 1.0)
    return found


def moved(batch, seed=0):
    """With random advantages, of either sign within a trajectory, and a policy that has moved on."""
    rng = np.random.default_rng(seed)
    of_all = rng.normal(0, 0.1, batch.num_trajectories)[batch.trajectory]
    now = batch["old"] + rng.normal(0, 0.2, batch.num_tokens) - of_all
    advantage = rng.normal(size=batch.num_tokens) * batch.loss_mask
    return batch.with_columns(current=now.astype(np.float32), advantage=advantage.astype(np.float32))


@pytest.mark.parametrize("delta", [0.0, 0.05])
def test_off_policy_sequence_masking_equals_the_reference(batch, delta):
    batch, sampled = moved(batch), batch.loss_mask == 1
    expected = opsm_reference(batch, delta)
    columns = algorithm(use_opsm=True, opsm_delta=delta).in_step(batch)
    assert columns["correction"][sampled].tolist() == expected and 0 < sum(expected) < len(expected)
    assert (columns["opsm_masked"] == (1 - columns["correction"]) * batch.loss_mask).all()
    weighed = batch.with_columns(correction=np.full(batch.num_tokens, 0.5, np.float32))
    both = algorithm(use_opsm=True, opsm_delta=delta).in_step(weighed)["correction"]
    assert both[sampled].tolist() == pytest.approx(0.5 * np.array(expected)), "beside importance weights"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), delta=st.floats(0, 0.3))
def test_only_failures_of_trajectories_far_away_are_masked(seed, delta):
    batch = moved(noisy(batch_of(trajectory(f"t{n}", [0.0, n]) for n in range(4)), seed=seed), seed)
    junk = np.random.default_rng(seed).normal(size=batch.num_tokens) * 50
    dirty = {n: np.where(batch.loss_mask == 1, batch[n], junk).astype(np.float32) for n in ("rollout", "current")}
    masked = algorithm(use_opsm=True, opsm_delta=delta).in_step(batch.with_columns(**dirty))["opsm_masked"] == 1
    assert not masked[batch.loss_mask == 0].any() and not masked[batch["advantage"] >= 0].any()
    for n in range(batch.num_trajectories):
        negative = (batch.trajectory == n) & (batch["advantage"] < 0)
        assert len(set(masked[negative])) <= 1, "a trajectory's failures are masked together"
    looser = algorithm(use_opsm=True, opsm_delta=delta + 0.05).in_step(batch)["opsm_masked"] == 1
    assert not (looser & ~masked).any()
    same = batch.with_columns(current=batch["rollout"])
    assert not algorithm(use_opsm=True, opsm_delta=delta).in_step(same)["opsm_masked"].any(), "on policy, nothing"


def test_off_policy_sequence_masking_asks_for_the_policy_before_each_step(batch):
    assert algorithm(use_opsm=True).infers(1) == ("old",) and algorithm(use_opsm=True).follows
    assert algorithm(use_opsm=True, use_rollout_logprobs=True).infers(2) == ()
    assert not algorithm().follows and algorithm().in_step(batch) == {}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), level=st.sampled_from(LEVELS), mode=st.sampled_from(["truncate", "mask"]))
def test_what_stands_at_masked_tokens_changes_no_weight(seed, level, mode):
    batch = noisy(batch_of(trajectory(f"t{n}", [0.0, n]) for n in range(3)), seed=seed)
    junk = np.random.default_rng(seed).normal(size=batch.num_tokens) * 50
    dirty = batch.with_columns(
        **{n: np.where(batch.loss_mask == 1, batch[n], junk).astype(np.float32) for n in ("old", "rollout")}
    )
    options = {"use_tis": True, "tis_mode": mode, "tis_level": level, "use_rs": True, "rs_level": level}
    clean = algorithm(**options).prepare(batch)["correction"]
    assert algorithm(**options).prepare(dirty)["correction"] == pytest.approx(clean)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_tis": True, "use_rollout_logprobs": True}, "--use-tis compares.*give --no-use-rollout-logprobs"),
        ({"use_rs": True, "use_rollout_logprobs": True}, "--use-rs compares"),
        ({"advantage_estimator": "gspo", "use_tis": True}, "--tis-level token does not go with gspo.*sequence"),
        ({"use_tis": True, "tis_clip_low": 3.0}, "--tis-clip 2 is less than the lower bound 3"),
        ({"use_rs": True, "rs_lower_bound": 3.0}, "--rs-upper-bound 2 is less"),
        ({"use_kl_loss": True, "kl_loss_type": "k1"}, "k1 in the loss pulls nowhere.*--use-unbiased-kl"),
        ({"use_kl_loss": True, "kl_loss_type": "k2", "use_unbiased_kl": True}, "k1, k3 or low_var_kl, not k2"),
        ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, "--eps-clip-c has no effect.*cispo"),
        ({"loss_type": "sft_loss", "use_opsm": True}, "--use-opsm has no effect.*policy that sampled"),
    ],
)
def test_what_does_not_go_together_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        algorithm(**options).check(8)


def test_what_goes_together_passes():
    algorithm(advantage_estimator="gspo", use_tis=True, tis_level="sequence", use_rs=True).check(8)
    algorithm(use_kl_loss=True, kl_loss_type="k1", use_unbiased_kl=True, eps_clip_c=3.0).check(8)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"use_kl_loss": True}, "--use-kl-loss has no effect"), ({"entropy_coef": 0.1}, "--entropy-coef has no effect")],
)
def test_a_loss_that_is_asked_for_a_term_that_it_has_not_is_refused(options, text):
    class Alone(GRPO):
        terms = ("clipped_surrogate",)

    with pytest.raises(ConfigError, match=text):
        Alone(AlgorithmOptions(**options)).check(8)
