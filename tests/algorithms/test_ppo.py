"""Generalized advantage estimation: the paper's sums in float64, and what a step is in a conversation with tools."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import TrainBatch, load_algorithm
from agentrl.algorithms.ppo import PPO, gae
from agentrl.config.schema import AlgorithmOptions
from agentrl.errors import ConfigError
from agentrl.types import Group, Segment, Task, Trajectory

TASK = Task("task", 0)


def segment(mask):
    mask = np.array(mask, np.uint8)
    logprobs = -0.5 * mask.astype(np.float32)
    return Segment(np.arange(len(mask), dtype=np.int32), mask, logprobs, mask.astype(np.int32), 1)


def trajectory(name, *masks, reward=0.0, turn_rewards=()):
    segments = [segment(mask) for mask in masks]
    return Trajectory(name, "g", TASK, segments, [], reward=reward, turn_rewards=list(turn_rewards))


def batch_of(*trajectories, **columns):
    return TrainBatch.from_groups([Group("g", TASK, list(trajectories))], {t.trajectory_id for t in trajectories})


def prepared(batch, values, **options):
    """Advantage and return of the sampled tokens, whose values are these, in the order of the batch."""
    sampled = batch.loss_mask == 1
    column = np.full(batch.num_tokens, 100.0, np.float32)  # elsewhere it is not to be looked at
    column[sampled] = values
    given = load_algorithm(AlgorithmOptions(advantage_estimator="ppo", **options)).prepare(
        batch.with_columns(values=column)
    )
    assert not given["advantage"][~sampled].any() and not given["returns"][~sampled].any()
    return given["advantage"][sampled], given["returns"][sampled]


def papers(rewards, values, gamma, lambd):
    """arXiv:1506.02438, equations 10 and 16, as they stand there."""
    n, following = len(rewards), [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lambd) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]


numbers = st.floats(-5, 5, width=32)


@given(
    st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9), max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_equals_the_papers_sums(trajectories, gamma, lambd):
    expected = [a for t in trajectories for a in papers(*zip(*t, strict=True), gamma, lambd)]
    steps = np.array([step for t in trajectories for step in t], np.float64).reshape(-1, 2)
    whose = np.repeat(np.arange(len(trajectories)), [len(t) for t in trajectories])
    assert gae(*steps.T, whose, gamma=gamma, lambd=lambd) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_lambda_one_takes_returns_and_lambda_zero_trusts_the_critic():
    batch, values = batch_of(trajectory("t", [0, 1, 1, 1], reward=2.0)), [0.5, 1.0, 1.5]
    advantage, returns = prepared(batch, values)
    assert advantage.tolist() == [1.5, 1.0, 0.5] and returns.tolist() == [2.0, 2.0, 2.0]
    advantage, returns = prepared(batch, values, gamma=0.5, lambd=0.0)
    assert advantage.tolist() == [0.0, -0.25, 0.5] and returns.tolist() == [0.5, 0.75, 2.0]


def test_the_value_that_follows_a_turn_is_that_of_the_next_turns_first_token():
    batch = batch_of(trajectory("t", [0, 1, 0, 0, 1], reward=1.0))
    advantage, _ = prepared(batch, [0.25, 0.75], lambd=0.0)
    assert advantage.tolist() == [0.5, 0.25]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4), st.randoms())
def test_tokens_of_the_environment_are_no_steps(masks, random):
    """With and without them, with other values there: the same credit."""
    masks = [[0, *mask, 1] for mask in masks]
    alone = [[0, *(1 for m in mask if m)] for mask in masks]
    rewards, values = [random.random() for _ in masks], [random.random() for mask in masks for m in mask if m]
    outcomes = [
        prepared(
            batch_of(*(trajectory(f"t{n}", m, reward=r) for n, (m, r) in enumerate(zip(these, rewards, strict=True)))),
            values,
            gamma=0.9,
            lambd=0.8,
        )
        for these in (masks, alone)
    ]
    assert np.array_equal(outcomes[0][0], outcomes[1][0]) and np.array_equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("level", ["trajectory", "turn"])
def test_segments_of_a_trajectory_are_one_after_the_other(level):
    values, options = [0.1, 0.2, 0.3, 0.4], {"gamma": 0.9, "lambd": 0.7, "credit_level": level}
    whole = trajectory("t", [0, 1, 1, 0, 1, 0, 1], reward=1.0, turn_rewards=[0.2, 0.3, 0.5])
    cut = trajectory("t", [0, 1, 1], [0, 0, 1, 0, 1], reward=1.0, turn_rewards=[0.2, 0.3, 0.5])
    assert np.array_equal(prepared(batch_of(whole), values, **options), prepared(batch_of(cut), values, **options))


@pytest.mark.parametrize("level", ["trajectory", "turn"])
def test_the_order_of_trajectories_does_not_matter(level):
    a = trajectory("a", [0, 1, 1, 0, 1], reward=1.0, turn_rewards=[0.5, 0.5])
    b = trajectory("b", [0, 1], [0, 0, 1, 1], reward=-1.0)
    options = {"gamma": 0.9, "lambd": 0.7, "credit_level": level}
    one = prepared(batch_of(a, b), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], **options)
    other = prepared(batch_of(b, a), [0.4, 0.5, 0.6, 0.1, 0.2, 0.3], **options)
    for here, there in zip(one, other, strict=True):
        assert here.tolist() == [*there[3:], *there[:3]]


def test_rewards_come_with_the_last_token_of_their_turn():
    turns = trajectory("t", [0, 1, 1, 0, 1], reward=1.75, turn_rewards=[0.5, 1.0])
    advantage, _ = prepared(batch_of(turns), [0, 0, 0], gamma=0.5, lambd=0.0)
    assert advantage.tolist() == [0.0, 0.5, 1.25]  # what is left, 0.25, with the last of all
    unknown = trajectory("t", [0, 1, 1, 0, 1], reward=1.75, turn_rewards=[0.5, 1.0, 0.25])
    advantage, _ = prepared(batch_of(unknown), [0, 0, 0], lambd=0.0)
    assert advantage.tolist() == [0.0, 0.0, 1.75]


def test_the_penalty_for_length_comes_with_the_last_token_of_all():
    options = {"overlong_handling": "penalty", "overlong_max_len": 3, "overlong_buffer_len": 1}
    batch = batch_of(trajectory("t", [0, 1, 1, 0, 1], reward=1.5, turn_rewards=[1.0, 0.5]), trajectory("u", [0, 1]))
    advantage, _ = prepared(batch, [0, 0, 0, 0], lambd=0.0, **options)
    assert advantage.tolist() == [0.0, 1.0, -0.5, 0.0]


def test_with_turns_as_steps_a_turn_shares_its_advantage():
    """Against the paper's sums over turns: values of their first tokens, rewards over their tokens."""
    played = trajectory("t", [0, 1, 1, 0, 1, 1, 1, 0, 1], reward=2.0, turn_rewards=[0.5, 0.0, 1.5])
    values = [0.3, 9.0, -0.2, 9.0, 9.0, 0.7]
    advantage, returns = prepared(batch_of(played), values, gamma=0.9, lambd=0.8, credit_level="turn")
    expected = papers([0.5, 0.0, 1.5], [0.3, -0.2, 0.7], 0.9, 0.8)
    assert advantage.tolist() == pytest.approx([expected[i] for i in (0, 0, 1, 1, 1, 2)], rel=1e-6)
    expected = [a + v for a, v in zip(expected, [0.3, -0.2, 0.7], strict=True)]
    assert returns.tolist() == pytest.approx([expected[i] for i in (0, 0, 1, 1, 1, 2)], rel=1e-6)


@pytest.mark.parametrize(("level", "expected"), [("trajectory", [-0.1, -0.3, 1.0]), ("turn", [-0.4, -0.4, 1.0])])
def test_kl_is_taken_from_the_reward_of_each_token(level, expected):
    batch = batch_of(trajectory("t", [0, 1, 1, 0, 1], reward=1.0))
    difference = np.array([0, 0.2, 0.6, 0, 0], np.float32)
    batch = batch.with_columns(ref=batch["rollout"] - difference)
    advantage, _ = prepared(batch, [0, 0, 0], kl_coef=0.5, lambd=0.0, credit_level=level)
    assert advantage.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_critic_with_nothing_to_learn_is_refused():
    class Unsaid(PPO):
        def returns(self, batch):
            return None

    batch = batch_of(trajectory("t", [0, 1], reward=1.0))
    with pytest.raises(ConfigError, match=r"there is a critic, but its returns\(batch\) does not say"):
        Unsaid(AlgorithmOptions()).prepare(batch.with_columns(values=np.zeros(2, np.float32)))
