"""How far the episodes at hand are."""

from __future__ import annotations

from agentrl.types import Outcome, Trajectory

EVALUATION = "the evaluation"


def name_of_rollout(step: int) -> str:
    """What the rollout is called that is trained on by weights of this version."""
    return f"rollout {step}"


class Tally:
    """Counts episodes as they end, and keeps the first one of the run to be shown."""

    def __init__(self) -> None:
        self._first: Trajectory | None = None
        self._shown = False
        self._totals: dict[str, int] = {}
        self._ended: dict[str, set[str]] = {}

    def begin(self, what: str, total: int) -> None:
        """So many episodes are to be played of ``what`` now: a rollout, an evaluation."""
        self._totals[what], self._ended[what] = total, set()

    def add(self, what: str, trajectory: Trajectory) -> None:
        """One has ended; where several agents played, one of its parts."""
        self._ended[what].add(trajectory.episode_id)
        if self._first is None and trajectory.outcome is not Outcome.INFRA_ERROR:
            self._first = trajectory

    def end(self, what: str) -> None:
        """It is over."""
        self._totals.pop(what, None)
        self._ended.pop(what, None)

    def peek(self, what: str) -> tuple[dict[str, int], Trajectory | None]:
        """Episodes done and in all; once, the first episode of the run."""
        example = None if self._shown else self._first
        self._shown = self._first is not None
        return {"done": len(self._ended.get(what, ())), "total": self._totals.get(what, 0)}, example
