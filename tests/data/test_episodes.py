"""What holds of an episode whose agents left a trajectory each."""

import pytest

from agentrl.data.episodes import by_episode, is_error, reward_of, solved
from agentrl.orchestrator.metrics import rollout_metrics
from agentrl.types import Group, StopReason, Task, Trajectory


def episode(*said, rewards=(0.0, 0.0)):
    return [
        Trajectory(
            f"e1:{agent}",
            f"g/{agent}",
            Task("t", 0),
            [],
            [],
            reward=reward,
            success=success,
            agent=agent,
            info={"episode_id": "e1"},
        )
        for agent, success, reward in zip(("guesser", "hinter"), said, rewards, strict=True)
    ]


@pytest.mark.parametrize(
    ("said", "rewards", "counts"),
    [
        ((None, True), (0.0, 0.0), True),
        ((False, True), (0.0, 0.0), True),
        ((False, None), (1.0, 1.0), False),
        ((None, None), (1.0, -0.5), True),
        ((None, None), (-1.0, 0.5), False),
    ],
)
def test_an_episode_of_several_agents_is_solved_when_it_was_said_of_any(said, rewards, counts):
    agents = episode(*said, rewards=rewards)
    assert solved(agents) is counts
    group = Group("g", agents[0].task, agents)
    assert rollout_metrics([group], 0)["rollout/success"] == float(counts), "training counts as evaluation does"


def test_agents_belong_to_one_episode_and_an_error_of_one_is_its():
    agents = episode(None, None, rewards=(1.0, 0.0))
    assert by_episode(agents) == [agents] and reward_of(agents) == 0.5
    agents[1].stop_reason = StopReason.TOOL_ERROR
    assert is_error(agents)
