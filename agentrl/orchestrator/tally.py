"""How far the episodes at hand are."""

from __future__ import annotations

from agentrl.types import Outcome, Trajectory


class Tally:
    """Counts episodes as they end, and keeps the first one of the run to be shown."""

    def __init__(self) -> None:
        self._first: Trajectory | None = None
        self._shown = False
        self.begin(0)

    def begin(self, total: int) -> None:
        """So many episodes are to be played now."""
        self._total, self._tokens = total, 0
        self._ended: set[str] = set()

    def add(self, trajectory: Trajectory) -> None:
        """One has ended; where several agents played, one of its parts."""
        self._ended.add(trajectory.episode_id)
        self._tokens += trajectory.num_sampled
        if self._first is None and trajectory.outcome is not Outcome.INFRA_ERROR:
            self._first = trajectory

    def peek(self) -> tuple[dict[str, int], Trajectory | None]:
        """Episodes done and in all, and tokens; once, the first episode of the run."""
        example = None if self._shown else self._first
        self._shown = self._first is not None
        return {"done": len(self._ended), "total": self._total, "tokens": self._tokens}, example
