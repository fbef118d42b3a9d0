"""Wrappers around agent environments."""

from agentrl.envs.wrappers.base import Wrapper
from agentrl.envs.wrappers.standard import (
    FixedTasks,
    ObservationHistory,
    RecordEpisodes,
    RetryOnInfraError,
    ShapeReward,
    TimeLimit,
    TruncateToolOutput,
)

__all__ = [
    "FixedTasks",
    "ObservationHistory",
    "RecordEpisodes",
    "RetryOnInfraError",
    "ShapeReward",
    "TimeLimit",
    "TruncateToolOutput",
    "Wrapper",
]
