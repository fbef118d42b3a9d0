"""What a person should hear of a start, or of a rollout, that goes through and yet does not go well."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import psutil

from agentrl.config.presets import demo_alone
from agentrl.config.schema import Config
from agentrl.data.episodes import by_episode
from agentrl.engines.world import World
from agentrl.planning import short_of_memory
from agentrl.types import Group, Outcome


def at_start(cfg: Config) -> list[str]:
    """What to know before a run starts."""
    here = not os.environ.get("RAY_ADDRESS") and not World.here().has_gpu
    notes = [demo_alone(cfg), short_of_memory(cfg, psutil.virtual_memory().available) if here else None]
    return [note for note in notes if note]


def lost_episodes(groups: Sequence[Group]) -> str | None:
    """How many episodes ended for reasons of infrastructure, and the last of these; None where none did."""
    episodes = by_episode(t for group in groups for t in group.trajectories)
    lost = [episode[0] for episode in episodes if episode[0].outcome is Outcome.INFRA_ERROR]
    if not lost:
        return None
    return (
        f"{len(lost)} of {len(episodes)} episodes were lost, in no baseline and not trained on; the last to "
        f"{lost[-1].stop_reason}: {lost[-1].error}"
    )


def nothing_to_learn(metrics: Mapping[str, float]) -> str | None:
    """Why a rollout teaches nothing: no group has two different rewards. None where one has."""
    if metrics["rollout/zero_variance"] < 1.0:
        return None
    advice = (
        "every episode is a success: harder tasks are needed"
        if metrics["rollout/success"] == 1.0
        else "`agentrl show RUN` shows them; easier tasks, a reward with steps in between, a model that can do some of "
        "it, or more --n-samples-per-prompt help"
    )
    return (
        "this rollout teaches nothing: the episodes of each task earned the same reward (mean "
        f"{metrics['rollout/reward']:.3f}); {advice}"
    )


def steps_left_out(metrics: Mapping[str, float]) -> str | None:
    """That optimizer steps were left out, and why; None where none was."""
    reasons = {
        "skipped": "a gradient was not finite (--max-skipped-steps)",
        "empty": "every gradient was 0 (the episodes of each task went alike), so weights stay as they are",
    }
    said = []
    for reason, text in reasons.items():
        left = {kind: int(metrics.get(f"{kind}/steps_{reason}", 0)) for kind in ("train", "critic")}
        if of := " and ".join(f"{n} of the {'policy' if kind == 'train' else kind}" for kind, n in left.items() if n):
            said.append(f"{of}: {text}")
    return f"optimizer steps of this rollout were left out, {'; '.join(said)}" if said else None


class Lasting:
    """Says what lasts when it begins, and again after twice as many steps each time: not a line at every step."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def say(self, kind: str, text: str | None) -> str | None:
        """``text`` where it is time to say it; None for ``text`` ends what lasted."""
        if text is None:
            self._steps.pop(kind, None)
            return None
        count = self._steps[kind] = self._steps.get(kind, 0) + 1
        if count & (count - 1):
            return None
        return text if count == 1 else f"{text} (for {count} rollouts now)"
