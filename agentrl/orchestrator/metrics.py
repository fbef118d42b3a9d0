"""Metrics of one rollout. Names are those of ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from agentrl.data.episodes import by_episode, oldest_version, reward_of, solved
from agentrl.types import Group, Outcome, Trajectory


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """What a rollout was like. Rates are in [0, 1], times in seconds, lengths in tokens.

    Episodes that failed for reasons of infrastructure are counted (``rollout/errors``) and enter nothing else. An
    episode of several agents counts once: its turns and tokens are those of all, its reward is their mean.
    """
    everything = [t for group in groups for t in group.trajectories]
    scored = [t for t in everything if t.outcome is not Outcome.INFRA_ERROR]
    episodes, all_episodes = by_episode(scored), by_episode(everything)
    rewards = [reward_of(e) for e in episodes]
    lengths = [sum(t.num_tokens for t in e) for e in episodes]
    oldest = oldest_version(scored)
    retries = [(call.get("metadata") or {}).get("retries", 0) for t in everything for call in t.tool_calls]
    metrics = {
        "rollout/reward": _mean(rewards),
        "rollout/reward_std": float(np.std(rewards)) if rewards else float("nan"),
        "rollout/success": _mean([float(solved(e)) for e in episodes]),
        "rollout/turns": _mean([sum(t.num_turns for t in e) for e in episodes]),
        "rollout/tool_calls": _mean([sum(len(t.tool_calls) for t in e) for e in episodes]),
        "rollout/tool_retries": float(sum(retries)),
        "rollout/response_tokens": _mean([sum(t.num_sampled for t in e) for e in episodes]),
        "rollout/episode_tokens": _mean(lengths),
        "rollout/episode_tokens_max": float(max(lengths, default=0)),
        "rollout/segments": _mean([len(t.segments) for t in scored]),
        "rollout/truncated": _mean([float(e[0].outcome is Outcome.TRUNCATED) for e in episodes]),
        "rollout/errors": float(len(all_episodes) - len(episodes)),
        "rollout/staleness_max": float(version - oldest) if math.isfinite(oldest) else 0.0,
        "rollout/tokens": float(sum(t.num_sampled for t in everything)),
    }
    durations = [e[0].timings.get("total", 0.0) for e in episodes]
    for share in (50, 95):
        metrics[f"rollout/episode_seconds_p{share}"] = float(np.percentile(durations, share)) if durations else 0.0
    for part in ("engine", "env"):
        metrics[f"rollout/{part}_seconds"] = _mean([sum(t.timings.get(part, 0.0) for t in e) for e in episodes])
    for name, values in _parts([e[0] for e in episodes]).items():
        metrics[f"rollout/reward/{name}"] = _mean(values)
    for reason, count in Counter(str(e[0].stop_reason) for e in all_episodes).items():
        metrics[f"rollout/stop/{reason}"] = count / len(all_episodes)
    return metrics | _of_agents(scored)


def pace(groups: Iterable[Group], seconds: float) -> dict[str, float]:
    """How fast ``groups`` were played in so many seconds."""
    sampled = sum(t.num_sampled for group in groups for t in group.trajectories)
    return {"rollout/tokens_per_s": sampled / max(seconds, 1e-9), "time/rollout": seconds}


def apart(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """Groups with a fate of their own, such as ``rollout/stale``: how many episodes, and the mean of their lengths, so
    that a bias towards short ones shows."""
    if not groups:
        return {}
    episodes = by_episode([t for group in groups for t in group.trajectories])
    return {name: float(len(episodes)), f"{name}_tokens": _mean([sum(t.num_tokens for t in e) for e in episodes])}


def _of_agents(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What is each agent's own, where several play."""
    of_agent: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.episode_id != trajectory.trajectory_id:
            of_agent.setdefault(trajectory.agent, []).append(trajectory)
    metrics = {}
    for agent, own in of_agent.items():
        metrics[f"rollout/agent/{agent}/reward"] = _mean([t.reward for t in own])
        metrics[f"rollout/agent/{agent}/turns"] = _mean([t.num_turns for t in own])
        metrics[f"rollout/agent/{agent}/response_tokens"] = _mean([t.num_sampled for t in own])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Each named part of the reward, over all episodes: one that did not earn a part has 0 of it."""
    names = {name: None for t in trajectories for name in t.rewards}
    return {name: [t.rewards.get(name, 0.0) for t in trajectories] for name in names}
