"""Trajectories taken together as the episodes they are of: one, or one for each agent. The rules of training and
evaluation alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from agentrl.types import Group, Outcome, Trajectory

Episode = Sequence[Trajectory]


def by_episode(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of each episode: one, or one for each of its agents."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.episode_id, []).append(trajectory)
    return list(found.values())


def group_of(trajectory: Trajectory) -> str:
    """Id of the group that its episode is of: its own, without the agent where several took part."""
    if trajectory.episode_id == trajectory.trajectory_id:
        return trajectory.group_id
    return trajectory.group_id.removesuffix(f"/{trajectory.agent}")


def by_group(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Trajectories as the groups that they were played as, in the order given."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(group_of(trajectory), []).append(trajectory)
    return [Group(name, members[0].task, members) for name, members in found.items()]


def is_whole(episode: Episode) -> bool:
    """Whether all agents of an episode are there: a kill may have come between the lines of two of them."""
    first = episode[0]
    return first.episode_id == first.trajectory_id or len(episode) == len(first.info.get("episode_agents", episode))


def is_error(episode: Episode) -> bool:
    """Whether an episode ended for reasons of infrastructure, so that it has no score."""
    return any(t.outcome is Outcome.INFRA_ERROR for t in episode)


def reward_of(episode: Episode) -> float:
    """The mean over its agents."""
    return math.fsum(t.reward for t in episode) / len(episode)


def solved(episode: Episode) -> bool:
    """What the environment said, of any of the agents; where it said nothing, whether the reward is above 0."""
    said = [t.success for t in episode if t.success is not None]
    return any(said) if said else reward_of(episode) > 0


def oldest_version(trajectories: Iterable[Trajectory]) -> float:
    """Version of the oldest weights that sampled a token of these; infinite where none was sampled."""
    sampled = [s for t in trajectories for s in t.segments if s.num_sampled]
    return min((int(s.versions[s.loss_mask == 1].min()) for s in sampled), default=math.inf)


def forget_training(trajectories: Iterable[Trajectory], *, advantage: bool = True) -> None:
    """What they were trained with is no longer in them: the next time it is something else. Their ``advantage``, which
    says that they were trained, only if asked."""
    for trajectory in trajectories:
        if advantage:
            trajectory.advantage = None
        for segment in trajectory.segments:
            segment.trained = {}
