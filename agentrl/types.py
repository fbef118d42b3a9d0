"""The nouns that travel: messages, tool calls, tasks, segments, trajectories, groups.

Nothing here imports torch, Ray or SGLang. Arrays are numpy, one dtype each:
``tokens`` int32, ``loss_mask`` uint8, ``logprobs`` float32, ``versions`` int32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

import numpy as np


class Message(TypedDict, total=False):
    """A chat message in the OpenAI form, as chat templates take it."""

    role: str
    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    weight: int  # 0: supervised fine-tuning does not learn it


class Outcome(StrEnum):
    """Whose doing the end of an episode was."""

    COMPLETED = "completed"  # the task decided
    TRUNCATED = "truncated"  # a budget ran out; `StopReason` says which
    POLICY_ERROR = "policy_error"  # the model made it impossible to go on; trains
    INFRA_ERROR = "infra_error"  # not the model's doing: retried, dropped, in no baseline


class StopReason(StrEnum):
    """Why an episode stopped. One per trajectory."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # one turn hit --rollout-max-response-len
    MAX_CONTEXT = "max_context"  # prompt and answer fill --rollout-max-context-len
    MAX_TOOL_OUTPUT = "max_tool_output"
    TIMEOUT = "timeout"  # wall time of the episode
    ENGINE_TIMEOUT = "engine_timeout"  # the same, most of it spent waiting for the engine; not trained
    ENV_TRUNCATED = "env_truncated"  # the env itself returned truncated=True
    POLICY_ERROR = "policy_error"
    ENV_ERROR = "env_error"
    TOOL_ERROR = "tool_error"  # infrastructure behind a tool
    ENGINE_ERROR = "engine_error"
    ABORTED = "aborted"

    @property
    def outcome(self) -> Outcome:
        return _OUTCOME_OF[self]


_OUTCOME_OF = {
    StopReason.DONE: Outcome.COMPLETED,
    StopReason.MAX_TURNS: Outcome.TRUNCATED,
    StopReason.MAX_TOKENS: Outcome.TRUNCATED,
    StopReason.MAX_CONTEXT: Outcome.TRUNCATED,
    StopReason.MAX_TOOL_OUTPUT: Outcome.TRUNCATED,
    StopReason.TIMEOUT: Outcome.TRUNCATED,
    StopReason.ENGINE_TIMEOUT: Outcome.TRUNCATED,
    StopReason.ENV_TRUNCATED: Outcome.TRUNCATED,
    StopReason.POLICY_ERROR: Outcome.POLICY_ERROR,
    StopReason.ENV_ERROR: Outcome.INFRA_ERROR,
    StopReason.TOOL_ERROR: Outcome.INFRA_ERROR,
    StopReason.ENGINE_ERROR: Outcome.INFRA_ERROR,
    StopReason.ABORTED: Outcome.INFRA_ERROR,
}


@dataclass(slots=True)
class ToolCall:
    """One call as parsed from the model's text. ``error`` is set when it could not be parsed."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Task:
    """One thing to attempt. ``task_id`` is stable over runs and machines.

    The episode loop resets with it: ``env.reset(seed=task.seed, options={"split": task.split, **task.options})``.
    ``options["index"]`` is the number of a task of a finite split; without it the task is drawn from the seed.
    """

    task_id: str
    seed: int
    split: str = "train"
    options: dict[str, Any] = field(default_factory=dict)
    env: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the engine. Log-probabilities are of the temperature-scaled softmax."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Of the run in what a runner is given, of the one request in what a client is given; heeded by engines in
    deterministic mode."""


@dataclass(slots=True)
class Generation:
    """An engine's answer to one turn. Arrays have one entry a sampled token, in order."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str  # "stop", "length" or "abort"
    cached_tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Segment:
    """A run of tokens the engine saw as one sequence.

    ``tokens``, ``loss_mask``, ``logprobs``, ``versions`` have equal length n. Where ``loss_mask`` is 0 the
    log-probability is 0 and the version -1. ``prompt_length`` counts the leading mask-0 tokens
    that were there before the first sampled one.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    prompt_length: int
    trained: dict[str, np.ndarray] = field(default_factory=dict)
    """What it was trained with, float32[n] by name, where that was kept: ``advantage``; log-probabilities: ``old`` of
    the ratio, ``current`` of the trainer in the token's own step, ``ref`` of the reference; the ``ratio`` itself."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())


@dataclass
class Trajectory:
    """One finished episode, or one agent's part of it: identity, tokens, messages, rewards, outcome, timings.

    With several agents ``trajectory_id`` is ``<episode>:<agent>`` and ``group_id`` is ``<group>/<agent>``.
    """

    trajectory_id: str
    group_id: str
    task: Task
    segments: list[Segment]
    messages: list[Message]
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # named parts of `reward`
    advantage: float | None = None  # what it was trained with, the mean over its tokens; None where it was not
    turn_rewards: list[float] = field(default_factory=list)
    success: bool | None = None
    stop_reason: StopReason = StopReason.DONE
    error: str | None = None
    num_turns: int = 0
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    agent: str = "agent"
    info: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  # seconds: engine, env, total, ...

    @property
    def outcome(self) -> Outcome:
        return self.stop_reason.outcome

    @property
    def episode_id(self) -> str:
        """The episode it is of: its own id, unless several agents took part and each left a trajectory."""
        return self.info.get("episode_id", self.trajectory_id)

    @property
    def num_sampled(self) -> int:
        return sum(s.num_sampled for s in self.segments)

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.segments)


@dataclass
class Group:
    """The n episodes of one task. Those of one agent share a baseline: all, unless there are several agents."""

    group_id: str
    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> np.ndarray:
        return np.array([t.reward for t in self.trajectories], dtype=np.float64)


def replace(obj: Any, **changes: Any) -> Any:
    """`dataclasses.replace`, re-exported so that callers need one import."""
    return dataclasses.replace(obj, **changes)
