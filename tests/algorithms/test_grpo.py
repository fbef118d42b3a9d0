"""Group-relative advantages: the paper's formula, and every edge case that has a defined outcome."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.algorithms import TrainBatch, zero_variance_fraction
from agentrl.algorithms.group import EPS
from agentrl.algorithms.grpo import GRPO
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError, DataError
from agentrl.types import Group, Segment, StopReason, Task, Trajectory

TASK = Task("task", 0)


def trajectory(name, reward, group="g", stop=StopReason.DONE, sampled=1):
    tokens = np.arange(3, dtype=np.int32)
    mask = np.array([0, 0, sampled], np.uint8)
    segment = Segment(tokens, mask, np.zeros(3, np.float32), np.zeros(3, np.int32), 2)
    return Trajectory(name, group, TASK, [segment], [], reward=reward, stop_reason=stop)


def group(rewards, name="g", **kwargs):
    return Group(name, TASK, [trajectory(f"{name}{i}", r, name, **kwargs) for i, r in enumerate(rewards)])


def grpo(groups, columns=None, **options):
    """Trajectory id -> advantage."""
    algorithm = GRPO(AlgorithmOptions(**options))
    batch = TrainBatch.from_groups(groups, algorithm.select(groups)).with_columns(**columns or {})
    batch = batch.with_columns(**algorithm.prepare(batch))
    assert (batch["advantage"][batch.loss_mask == 0] == 0).all()
    return dict(zip(batch.trajectory_ids, batch.sums(batch["advantage"]).tolist(), strict=True))


@pytest.mark.parametrize("rewards", [[0, 1], [0.0, 0.5, 1.0, 1.0], [3.0, -2.0, 0.1]])
def test_equals_the_papers_formula(rewards):
    r = np.array(rewards, np.float64)
    expected = (r - r.mean()) / (r.std(ddof=1) + EPS)
    assert list(grpo([group(rewards)]).values()) == pytest.approx(expected.tolist(), rel=1e-6)
    plain = grpo([group(rewards)], grpo_std_normalization=False)
    assert list(plain.values()) == pytest.approx((r - r.mean()).tolist(), rel=1e-6)


def test_groups_do_not_touch_and_order_does_not_matter():
    a, b = group([0, 1], "a"), group([5, 5, 8], "b")
    together = grpo([a, b])
    assert together == grpo([a]) | grpo([b])
    mixed = Group("b", TASK, list(reversed(b.trajectories)))
    assert grpo([mixed, a]) == pytest.approx(together)


def test_one_group_in_two_pieces_is_one_group():
    whole = group([0, 1, 1, 0], "a")
    halves = [Group("a", TASK, whole.trajectories[:2]), Group("a", TASK, whole.trajectories[2:])]
    assert grpo(halves) == grpo([whole])


@pytest.mark.parametrize("reason", [StopReason.ENGINE_ERROR, StopReason.ENGINE_TIMEOUT])
def test_what_is_not_the_models_doing_is_in_no_baseline(reason):
    members = group([0, 1], "a")
    members.trajectories.append(trajectory("broken", 100.0, "a", stop=reason))
    assert grpo([members]) == grpo([group([0, 1], "a")])


def test_the_models_own_errors_train():
    members = group([1, 1], "a")
    members.trajectories.append(trajectory("bad", 0.0, "a", stop=StopReason.POLICY_ERROR))
    assert grpo([members])["bad"] < 0


def test_zero_variance_gives_exact_zeros_and_stays():
    advantages = grpo([group([0.1] * 7)])
    assert len(advantages) == 7
    assert set(advantages.values()) == {0.0}


def test_the_share_without_variance_counts_trajectories():
    batch = TrainBatch.from_groups([group([0, 1, 2], "a")], {"a0", "a1", "a2"})
    assert zero_variance_fraction(batch.with_columns(advantage=batch.spread(np.array([0.0, 1.0, 0.0])))) == 2 / 3


def test_fewer_than_two_members_are_left_out():
    one = group([1.0], "a")
    one.trajectories.append(trajectory("broken", 0.0, "a", stop=StopReason.ENV_ERROR))
    assert grpo([one, group([], "b")]) == {}


def test_nothing_sampled_is_left_out():
    members = group([0, 1], "a")
    members.trajectories.append(trajectory("silent", 1.0, "a", sampled=0))
    assert "silent" not in grpo([members])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error(reward):
    with pytest.raises(DataError, match="a1"):
        grpo([group([0.0, reward], "a")])


def test_one_id_twice_is_an_error():
    twice = Group("a", TASK, [trajectory("x", 0.0, "a"), trajectory("x", 1.0, "a")])
    with pytest.raises(DataError, match="twice"):
        grpo([twice])


def test_one_episode_a_task_is_refused_for_what_compares():
    with pytest.raises(ConfigError, match="--n-samples-per-prompt 1 teaches nothing: grpo compares"):
        GRPO(AlgorithmOptions()).check(1)


def test_kl_in_the_reward_is_taken_from_it_before_the_groups_mean():
    """RLOO's equation 1: r - beta * log(pi / ref), summed over the trajectory."""
    ref = np.array([0, 0, -1.0, 0, 0, -3.0], np.float32)
    options = {"kl_coef": 0.5, "grpo_std_normalization": False}
    advantages = grpo([group([1.0, 1.0], "a")], {"ref": ref}, **options)
    assert advantages == {"a0": 0.5, "a1": -0.5}  # rewards 1 - 0.5 and 1 - 1.5
    assert GRPO(AlgorithmOptions(kl_coef=0.5)).infers(1) == ("ref",)
    assert GRPO(AlgorithmOptions(kl_coef=0.5, use_rollout_logprobs=False)).infers(1) == ("old", "ref")
