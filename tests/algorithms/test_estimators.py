"""Each estimator's credit against a float64 reference written from its paper's equation, and what holds for all."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import ALGORITHMS, TrainBatch, load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError
from agentrl.types import Group, StopReason
from tests.algorithms.samples import TASK, batch_of, by_turn, credit, noisy, segment, trajectory, valued

GROUPS = {"a": [0.0, 1.0, 1.0, 0.25], "b": [2.0, -1.0], "c": [0.5, 0.5, 0.5]}  # uneven, and one without variance
COMPARING = [name for name, algorithm in ALGORITHMS.items() if algorithm.compares]


def uneven():
    return batch_of(
        trajectory(f"{group}{n}", [0.0] * n + [reward], group)
        for group, rewards in GROUPS.items()
        for n, reward in enumerate(rewards)
    )


def grpo(rewards):
    """DeepSeekMath, arXiv:2402.03300, section 4.1.2."""
    spread = statistics.stdev(rewards)
    return [(r - statistics.fmean(rewards)) / (spread + 1e-6) if spread else 0.0 for r in rewards]


def dr_grpo(rewards):
    """Dr. GRPO, arXiv:2503.20783, equation 2."""
    return [r - statistics.fmean(rewards) for r in rewards]


def rloo(rewards):
    """Ahmadian et al., arXiv:2402.14740, equation 9."""
    return [r - statistics.fmean(rewards[:n] + rewards[n + 1 :]) for n, r in enumerate(rewards)]


REFERENCES = {"grpo": grpo, "gspo": grpo, "cispo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


@pytest.mark.parametrize("name", REFERENCES)
def test_group_credit_equals_the_papers_equation(name):
    batch = uneven()
    expected = [a for rewards in GROUPS.values() for a in REFERENCES[name](rewards)]
    values = credit(batch, name)
    assert batch.means(values).tolist() == pytest.approx(expected, abs=1e-6)
    assert (values == batch.spread(batch.means(values))).all()  # the same on all tokens of a trajectory
    assert set(values[batch.group == 2]) == {0.0}


def whitened(values):
    """REINFORCE++, arXiv:2501.03262: (A - mean) / std over the tokens of the batch."""
    mean, spread = statistics.fmean(values), statistics.pstdev(values)
    return [(v - mean) / (spread + 1e-6) for v in values]


def test_reinforce_plus_plus_normalizes_each_tokens_return_over_the_batch():
    """arXiv:2501.03262, equations 8 and 9: A_t = r - beta * sum of KL(i), i from t to the end; whitened."""
    batch, beta = noisy(uneven()), 0.2
    returns, places = [], []
    for n, reward in enumerate(batch.rewards):
        own = [t for t in range(batch.num_tokens) if batch.trajectory[t] == n and batch.loss_mask[t]]
        kl = [float(batch["old"][t]) - float(batch["ref"][t]) for t in own]
        returns += [reward - beta * math.fsum(kl[i:]) for i in range(len(own))]
        places += own
    values = credit(batch, "reinforce_plus_plus", kl_coef=beta)
    assert values[places].tolist() == pytest.approx(whitened(returns), abs=1e-5)
    plain = credit(batch, "reinforce_plus_plus")
    assert plain[places].tolist() == pytest.approx(whitened([batch.rewards[batch.trajectory[t]] for t in places]), 1e-5)


def test_reinforce_plus_plus_baseline_normalizes_what_the_group_leaves_over_the_batch():
    """arXiv:2501.03262, REINFORCE++-baseline: r - mean(group), whitened over the tokens of the batch."""
    batch = uneven()
    centred = [a for rewards in GROUPS.values() for a in dr_grpo(rewards)]
    places = np.flatnonzero(batch.loss_mask)
    expected = whitened([centred[batch.trajectory[t]] for t in places])
    assert credit(batch, "reinforce_plus_plus_baseline")[places].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_trajectories_does_not_matter(name):
    batch = uneven()
    members = [trajectory(f"{g}{n}", [0.0] * n + [r], g) for g, rs in GROUPS.items() for n, r in enumerate(rs)]
    random.Random(1).shuffle(members)
    mixed = batch_of(members)
    for level in ("trajectory", "turn"):
        values = [dict(zip(b.trajectory_ids, by_turn(b, credit(b, name, credit_level=level)), strict=True))
                  for b in (batch, mixed)]  # fmt: skip
        for key, turns in values[0].items():
            assert values[1][key] == pytest.approx(turns, abs=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_trajectorys_credit_is_on_all_its_segments(name):
    """However a trajectory is cut into segments, its tokens get what they would get in one."""

    def members(cut):
        for n, reward in enumerate([0.0, 1.0, 3.0]):
            parts = [segment([2]), segment([1, 3])] if cut else [segment([2, 1, 3])]
            yield trajectory(f"t{n}", [0.0, 0.5 * n, reward], segments=parts)

    for level in ("trajectory", "turn"):
        whole, cut = (batch_of(members(cut)) for cut in (False, True))
        expected = by_turn(whole, credit(whole, name, credit_level=level))
        assert by_turn(cut, credit(cut, name, credit_level=level)) == expected


@pytest.mark.parametrize("name", COMPARING)
def test_agents_of_an_episode_are_compared_each_with_its_own_kind(name):
    """What one agent earns is in no baseline of another's."""

    def episode(n, left, right):
        info = {"episode_id": f"e{n}"}
        return [
            trajectory(f"e{n}:left", [left], "g/left", info=info),
            trajectory(f"e{n}:right", [right], "g/right", info=info),
        ]

    alone = [episode(0, 0.0, 0.0)[0], episode(1, 1.0, 0.0)[0]]
    both = [t for n, left, right in ((0, 0.0, 70.0), (1, 1.0, 70.0)) for t in episode(n, left, right)]
    together = batch_of(both)
    assert set(together.group_of) == {0, 1} and together.num_episodes == 2
    if name != "reinforce_plus_plus_baseline":  # its scale is the batch's
        apart = batch_of(alone)
        left = together.means(credit(together, name))[[0, 2]]
        assert left.tolist() == pytest.approx(apart.means(credit(apart, name)).tolist())
    assert together.means(credit(together, name))[[1, 3]].tolist() == [0.0, 0.0]


# -- turns -----------------------------------------------------------------------------------------------


def test_turns_are_counted_over_segments_and_their_rewards_add_up():
    batch = batch_of([
        trajectory("a", [1.0, 2.0, 4.0], segments=[segment([2]), segment([1, 3])]),
        trajectory("b", [0.5]),
        trajectory("c", [3.0], turns=[1, 1]),  # one reward for two turns, as of a custom generate function
    ])  # fmt: skip
    assert batch.turns_of.tolist() == [3, 1, 2]
    assert batch.turn_in_trajectory[batch.loss_mask == 1].tolist() == [0, 0, 1, 2, 2, 2, 0, 0, 1]
    assert batch.rewards_of_turns.tolist() == [[1, 2, 4], [0.5, 0, 0], [0, 3, 0]]
    ones = np.ones(batch.num_tokens)
    assert batch.sums_of_turns(ones).tolist() == [[2, 1, 3], [1, 0, 0], [1, 1, 0]]
    assert batch.from_here(ones)[batch.loss_mask == 1].tolist() == [6, 5, 4, 3, 2, 1, 1, 2, 1]


def test_a_turn_is_credited_with_what_is_earned_from_it_on():
    """G_k = r_k + gamma G_(k+1), against the mean of the others' returns of the same turn, or of their last one."""
    rewards, gamma = [[1.0, 2.0, 4.0], [3.0], [0.0, 8.0]], 0.5
    batch = batch_of(trajectory(f"t{n}", r) for n, r in enumerate(rewards))
    returns = [[1 + 1 + 1, 2 + 2, 4], [3], [4, 8]]
    expected = []
    for n, own in enumerate(returns):
        others = [r for m, r in enumerate(returns) if m != n]
        expected.append([g - statistics.fmean(r[min(k, len(r) - 1)] for r in others) for k, g in enumerate(own)])
    assert by_turn(batch, credit(batch, "rloo", credit_level="turn", gamma=gamma)) == expected


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_one_reward_at_the_end_a_turns_credit_is_the_trajectorys(name):
    batch = uneven()
    assert credit(batch, name, credit_level="turn").tolist() == credit(batch, name).tolist()


def test_the_kl_of_a_turn_is_taken_from_its_own_reward():
    batch = noisy(batch_of([trajectory("a", [1.0, 2.0]), trajectory("b", [3.0])]))
    kl = batch.sums_of_turns(batch["old"] - batch["ref"])
    a = [1.0 - 0.5 * kl[0, 0] + 2.0 - 0.5 * kl[0, 1], 2.0 - 0.5 * kl[0, 1]]
    b = 3.0 - 0.5 * kl[1, 0]
    values = by_turn(batch, credit(batch, "rloo", credit_level="turn", kl_coef=0.5))
    assert values[0] == pytest.approx([a[0] - b, a[1] - b], rel=1e-5)
    assert values[1] == pytest.approx([b - a[0]], rel=1e-5)


def policy_gradient(name, level, baseline_free=False):
    """The expected gradient of the first turn's and second turn's logit, over all outcomes of a group of two.

    Each of two turns is a coin of the policy's; a trajectory that says 0 in the first turn ends there, so how many
    turns there are is the policy's doing. Rewards: 1 for going on, 3 more for a 1 in the second turn.
    """
    p, q = 0.6, 0.3
    outcomes = [((0,), (1 - p), [0.0]), ((1, 0), p * (1 - q), [1.0, 0.0]), ((1, 1), p * q, [1.0, 3.0])]
    total = np.zeros(2)
    for first in outcomes:
        for second in outcomes:
            batch = batch_of([trajectory("a", first[2]), trajectory("b", second[2])])
            values = by_turn(batch, credit(batch, name, credit_level=level))
            for actions, advantages in zip((first[0], second[0]), values, strict=True):
                for turn, (action, advantage) in enumerate(zip(actions, advantages, strict=True)):
                    score = action - (p, q)[turn]  # of a Bernoulli policy by its logit
                    total[turn] += first[1] * second[1] * score * advantage / 2
    return total


def test_a_baseline_by_turn_brings_no_bias_where_the_number_of_turns_is_the_policys_doing():
    """verl's issue 7244: a baseline over those that reached a turn is biased. Exact, by enumeration."""
    p, q = 0.6, 0.3
    true = np.array([p * (1 - p) * (1 + 3 * q), p * q * (1 - q) * 3])  # of E[reward] = p + 3pq, by the logits
    assert policy_gradient("rloo", "turn") == pytest.approx(true, rel=1e-6)
    assert policy_gradient("rloo", "trajectory") == pytest.approx(true, rel=1e-6)
    assert policy_gradient("dr_grpo", "turn") == pytest.approx(true / 2, rel=1e-6)  # (n-1)/n, as its paper has it


# -- what is defined of odd members ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*COMPARING, "reinforce_plus_plus"])
def test_errors_are_in_no_baseline_and_truncated_members_are(name):
    members = [trajectory(f"t{n}", [r]) for n, r in enumerate([0.0, 1.0])]
    lost = [trajectory("lost", [50.0], stop=s) for s in (StopReason.ENV_ERROR, StopReason.ENGINE_TIMEOUT)]
    cut = trajectory("cut", [0.5], stop=StopReason.MAX_CONTEXT)
    algorithm = load_algorithm(AlgorithmOptions(advantage_estimator=name))
    for broken in lost:
        groups = [Group("g", TASK, [*members, broken, cut])]
        batch = TrainBatch.from_groups(groups, algorithm.select(groups))
        assert batch.trajectory_ids == ("t0", "t1", "cut")
        assert batch.means(algorithm.prepare(batch)["advantage"])[2] == pytest.approx(0, abs=1e-6)


def test_one_episode_a_task_trains_where_nothing_is_compared():
    lone = [Group(f"g{n}", TASK, [trajectory(f"t{n}", [float(n)], f"g{n}")]) for n in range(3)]
    for name in ALGORITHMS:
        algorithm = load_algorithm(AlgorithmOptions(advantage_estimator=name))
        if algorithm.compares:
            with pytest.raises(ConfigError, match=f"--n-samples-per-prompt 1 teaches nothing: {name} compares"):
                algorithm.check(1)
            assert algorithm.select(lone) == set()
        else:
            algorithm.check(1)
            batch = TrainBatch.from_groups(lone, algorithm.select(lone))
            assert batch.means(algorithm.prepare(valued(batch, algorithm))["advantage"])[2] > 0
    assert [n for n in ALGORITHMS if n not in COMPARING] == ["ppo", "reinforce_plus_plus"]


# -- masks -----------------------------------------------------------------------------------------------

TURNS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(list(ALGORITHMS)),
    level=st.sampled_from(["trajectory", "turn"]),
    turns=st.lists(TURNS, min_size=2, max_size=5),
    rewards=st.lists(st.floats(-3, 3), min_size=15, max_size=15),
    seed=st.integers(0, 99),
)
def test_what_was_not_sampled_has_no_credit_and_changes_none(name, level, turns, rewards, seed):
    """Whatever stands at masked tokens, in ids or columns, credit is the same, and 0 there."""
    members = [
        trajectory(f"t{n}", rewards[3 * n : 3 * n + len(own)], turns=own, segments=[segment(own), segment([1])][:1])
        for n, own in enumerate(turns)
    ]
    batch = noisy(batch_of(members), seed=seed)
    rng, masked = np.random.default_rng(seed), batch.loss_mask == 0
    junk = {n: np.where(masked, rng.normal(size=batch.num_tokens), batch[n]).astype(np.float32) for n in ("old", "ref")}
    options = {"kl_coef": 0.1, "credit_level": level}
    values = credit(batch, name, **options)
    assert (values[masked] == 0).all() and np.isfinite(values).all()
    assert credit(batch.with_columns(**junk), name, **options) == pytest.approx(values)
