"""Episodes that grow too long: kept, masked, or punished softly."""

from __future__ import annotations

import pytest

from agentrl.algorithms import load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.types import StopReason
from tests.algorithms.samples import batch_of, by_turn, credit, trajectory

LENGTHS = (3, 6, 8, 9, 12)


def test_the_soft_penalty_equals_the_papers_equation():
    """DAPO, arXiv:2503.14476, equation 13, with L_max = 10 and L_cache = 4."""

    def length_reward(y, l_max=10, l_cache=4):
        if y <= l_max - l_cache:
            return 0.0
        return ((l_max - l_cache) - y) / l_cache if y <= l_max else -1.0

    batch = batch_of(trajectory(f"t{n}", [1.0], turns=[n]) for n in LENGTHS)
    options = AlgorithmOptions(
        overlong_handling="penalty", overlong_max_len=10, overlong_buffer_len=4, overlong_penalty_factor=0.5
    )
    rewards = load_algorithm(options).rewards(batch)
    assert rewards.tolist() == [1.0 + 0.5 * length_reward(n) for n in LENGTHS]


def test_by_turn_the_penalty_is_of_the_last_one():
    members = [trajectory("a", [1.0, 1.0], turns=[2, 3]), trajectory("b", [0.0], turns=[1])]
    options = {"overlong_max_len": 5, "overlong_buffer_len": 1, "gamma": 0.5, "credit_level": "turn"}
    values = by_turn(batch_of(members), credit(batch_of(members), "rloo", overlong_handling="penalty", **options))
    assert values == [[1.0, 0.0], [-1.0]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "reinforce_plus_plus"])
def test_masked_ones_are_compared_and_then_in_no_loss_and_no_count(name):
    members = [trajectory("a", [1.0]), trajectory("b", [0.0], stop=StopReason.MAX_CONTEXT), trajectory("c", [0.5])]
    batch = batch_of(members)
    options = AlgorithmOptions(advantage_estimator=name, overlong_handling="mask", loss_scale_factor=10)
    algorithm = load_algorithm(options)
    masked = batch.with_columns(**algorithm.prepare(batch))
    assert masked["advantage"].tolist() == credit(batch, name).tolist()
    weights = batch.sums(algorithm.aggregate(masked, range(3)))
    assert weights[1] == 0 and weights[0] == weights[2] > 0
    assert algorithm.metrics(masked) == {"train/overlong_masked": 1 / 3}
    assert not algorithm.aggregate(masked, [1]).any()
    keep = load_algorithm(AlgorithmOptions(advantage_estimator=name))
    assert "in_loss" not in keep.prepare(batch)
