"""Metrics of one rollout. Names are those of ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.trainer.advantages import zero_variance_fraction
from agentrl.types import Group, Outcome, Trajectory


def rollout_metrics(
    groups: Sequence[Group], advantages: Mapping[str, float], seconds: float, version: int
) -> dict[str, float]:
    """What a rollout was like. Rates are in [0, 1], times in seconds, lengths in tokens.

    Episodes that failed for reasons of infrastructure are counted (``rollout/errors``) and enter nothing else.
    """
    everything = [t for group in groups for t in group.trajectories]
    scored = [t for t in everything if t.outcome is not Outcome.INFRA_ERROR]
    generated = sum(t.num_sampled for t in everything)
    metrics = {
        "rollout/reward": _mean([t.reward for t in scored]),
        "rollout/reward_std": float(np.std([t.reward for t in scored])) if scored else float("nan"),
        "rollout/success": _mean([float(_solved(t)) for t in scored]),
        "rollout/turns": _mean([t.num_turns for t in scored]),
        "rollout/tool_calls": _mean([len(t.tool_calls) for t in scored]),
        "rollout/response_tokens": _mean([t.num_sampled for t in scored]),
        "rollout/episode_tokens": _mean([t.num_tokens for t in scored]),
        "rollout/episode_tokens_max": float(max((t.num_tokens for t in scored), default=0)),
        "rollout/segments": _mean([len(t.segments) for t in scored]),
        "rollout/truncated": _mean([float(t.outcome is Outcome.TRUNCATED) for t in scored]),
        "rollout/errors": float(len(everything) - len(scored)),
        "rollout/zero_variance": zero_variance_fraction(dict(advantages)),
        "rollout/staleness_max": _staleness(scored, version),
        "rollout/tokens": float(generated),
        "rollout/tokens_per_s": generated / max(seconds, 1e-9),
        "time/rollout": seconds,
    }
    durations = [t.timings.get("total", 0.0) for t in scored]
    for share in (50, 95):
        metrics[f"rollout/episode_seconds_p{share}"] = float(np.percentile(durations, share)) if durations else 0.0
    for part in ("engine", "env"):
        metrics[f"rollout/{part}_seconds"] = _mean([t.timings.get(part, 0.0) for t in scored])
    for name, part in _parts(scored).items():
        metrics[f"rollout/reward/{name}"] = _mean(part)
    for reason, count in Counter(str(t.stop_reason) for t in everything).items():
        metrics[f"rollout/stop/{reason}"] = count / len(everything)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _solved(trajectory: Trajectory) -> bool:
    return trajectory.success if trajectory.success is not None else trajectory.reward > 0


def _staleness(trajectories: Sequence[Trajectory], version: int) -> float:
    """Largest age, in weight versions, of a sampled token."""
    oldest = [int(s.versions[s.loss_mask == 1].min()) for t in trajectories for s in t.segments if s.num_sampled]
    return float(version - min(oldest)) if oldest else 0.0


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Each named part of the reward, over all episodes: one that did not earn a part has 0 of it."""
    names = {name: None for t in trajectories for name in t.rewards}
    return {name: [t.rewards.get(name, 0.0) for t in trajectories] for name in names}
