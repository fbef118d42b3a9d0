"""Trajectories in turns, for tests of credit."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms import TrainBatch, load_algorithm
from agentrl.config.schema import AlgorithmOptions
from agentrl.types import Group, Segment, StopReason, Task, Trajectory

TASK = Task("task", 0)


def segment(turns, *, version=0):
    """A prompt of 2 tokens, then turns of so many sampled tokens with one of the environment between."""
    mask = np.array([0, 0] + [bit for n in turns for bit in [1] * n + [0]], np.uint8)[:-1]
    versions = np.where(mask, version, -1).astype(np.int32)
    return Segment(np.arange(len(mask), dtype=np.int32), mask, -0.5 * mask.astype(np.float32), versions, 2)


def trajectory(name, rewards, group="g", *, turns=None, segments=None, stop=StopReason.DONE, info=None):
    """One that earned ``rewards`` in its turns, of 1, 2, 3 ... tokens unless told otherwise."""
    turns = turns or list(range(1, len(rewards) + 1))
    return Trajectory(
        name, group, TASK, segments or [segment(turns)], [], reward=float(sum(rewards)), turn_rewards=list(rewards),
        stop_reason=stop, num_turns=len(turns), info=info or {},
    )  # fmt: skip


def batch_of(trajectories, **columns) -> TrainBatch:
    """All of these."""
    members = list(trajectories)
    batch = TrainBatch.from_groups([Group("g", TASK, members)], {t.trajectory_id for t in members})
    return batch.with_columns(**columns)


def noisy(batch, *, seed=0, scale=0.3):
    """The batch with columns ``old`` and ``ref`` near the engine's."""
    rng = np.random.default_rng(seed)
    near = {n: batch["rollout"] + scale * rng.normal(size=batch.num_tokens) * batch.loss_mask for n in ("old", "ref")}
    return batch.with_columns(**{name: values.astype(np.float32) for name, values in near.items()})


def credit(batch, name, **options):
    """Advantage of each token, as the trainer gets it."""
    algorithm = load_algorithm(AlgorithmOptions(advantage_estimator=name, use_rollout_logprobs=False, **options))
    return algorithm.prepare(valued(batch, algorithm))["advantage"]


def valued(batch, algorithm):
    """The batch with values of a critic that knows nothing, if there is one."""
    return batch.with_columns(values=np.zeros(batch.num_tokens)) if "values" in algorithm.needs else batch


def by_turn(batch, values):
    """The number of each turn, a list a trajectory; all tokens of a turn must have the same."""
    found = [[] for _ in range(batch.num_trajectories)]
    for t in np.flatnonzero(batch.loss_mask):
        own, turn = found[batch.trajectory[t]], batch.turn_in_trajectory[t]
        if turn == len(own):
            own.append(float(values[t]))
        assert own[turn] == values[t]
    return found
