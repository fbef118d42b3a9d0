"""The account of every task: handed out, in training, trained or given up.

A task is handed out to be played as one group, which is in exactly one state:

    to come ──▶ in flight ──▶ ready ──▶ trained

From in flight, or ready, it may also be dropped, or given back: then it is in flight again at the next chance.
What was handed out and is not listed as in flight, ready, given back or dropped has been trained, so
the account does not grow with the run. Saved state holds no trajectories: what was in flight, ready or given
back is handed out again, under the same group id, before anything new; what was ready need not be played again
(``orchestrator/buffer.py``).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.errors import DataError
from agentrl.loading import load_object
from agentrl.tasks.source import DataSource
from agentrl.types import Group, Task

if TYPE_CHECKING:
    from agentrl.config.schema import Config


@dataclass(frozen=True)
class PendingGroup:
    """A task to be played. ``group_id`` is unique in the run and stays the task's when it is handed out again."""

    group_id: str
    task: Task


class TaskAccount:
    """Hands out tasks and accounts for each until it was trained on.

    Not thread-safe: it belongs to the one process that manages rollouts.
    """

    def __init__(self, source: DataSource):
        self.source = source
        self._issued = 0
        self._trained = 0
        self._dropped = 0
        self._open: dict[str, PendingGroup] = {}  # in flight or ready
        self._ready: set[str] = set()
        self._given_back: deque[PendingGroup] = deque()

    def get_samples(self, num_samples: int) -> list[PendingGroup]:
        """The next ``num_samples`` groups to play, now in flight: first what was given back, then new tasks. Fewer only
        when the source has no more."""
        pending = [self._given_back.popleft() for _ in range(min(num_samples, len(self._given_back)))]
        missing = num_samples - len(pending)
        if missing > 0:
            for task in self.source.get_samples(missing):
                if not isinstance(task, Task):
                    raise DataError(
                        f"{type(self.source).__name__}.get_samples gave {type(task).__name__}, expected agentrl.Task"
                    )
                pending.append(PendingGroup(f"g{self._issued:08d}", task))
                self._issued += 1
        self._open.update((each.group_id, each) for each in pending)
        return pending

    def add_samples(self, samples: Iterable[Group]) -> None:
        """Groups that finished: from in flight to ready. Raises DataError on one that was not in flight."""
        groups = list(samples)
        for group in groups:
            if group.group_id not in self._open or group.group_id in self._ready:
                raise DataError(f"Group {group.group_id} is not in flight: it finished before or was never handed out.")
            self._ready.add(group.group_id)
        self.source.add_samples(groups)

    def mark_trained(self, group_ids: Iterable[str]) -> None:
        """The optimizer step over these groups is done. Raises DataError on one that is not in flight or ready."""
        self._trained += len(self._close(group_ids))

    def give_back(self, group_ids: Iterable[str]) -> None:
        """These were not finished (an abort, a dead engine): they are handed out again, before anything new."""
        self._given_back.extend(self._close(group_ids))

    def drop(self, group_ids: Iterable[str]) -> None:
        """Give these up for good, after the retries of infrastructure errors; counted."""
        self._dropped += len(self._close(group_ids))

    def _close(self, group_ids: Iterable[str]) -> list[PendingGroup]:
        closed = []
        for group_id in group_ids:
            if group_id not in self._open:
                raise DataError(f"Group {group_id} is not in flight: it was trained, dropped or never handed out.")
            self._ready.discard(group_id)
            closed.append(self._open.pop(group_id))
        return closed

    @property
    def counts(self) -> dict[str, int]:
        """Groups by state; ``issued`` is the sum of the others."""
        return {
            "issued": self._issued,
            "in_flight": len(self._open) - len(self._ready),
            "given_back": len(self._given_back),
            "ready": len(self._ready),
            "trained": self._trained,
            "dropped": self._dropped,
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state: position, counts, and every group that is neither trained nor dropped."""
        pending = sorted([*self._given_back, *self._open.values()], key=lambda each: each.group_id)
        state: dict[str, Any] = {
            "issued": self._issued,
            "trained": self._trained,
            "dropped": self._dropped,
            "open": [{"group_id": each.group_id, "task": dataclasses.asdict(each.task)} for each in pending],
        }
        if hasattr(self.source, "state_dict"):
            state["source"] = self.source.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; open groups are handed out first. Raises DataError when it does not add up."""
        pending = [PendingGroup(each["group_id"], Task(**each["task"])) for each in state["open"]]
        issued, trained, dropped = int(state["issued"]), int(state["trained"]), int(state["dropped"])
        if issued != trained + dropped + len(pending):
            raise DataError(
                f"The saved account does not add up: {issued} issued, {trained} trained, {dropped} dropped, "
                f"{len(pending)} open."
            )
        if hasattr(self.source, "load_state_dict") and "source" in state:
            self.source.load_state_dict(state["source"])
        self._issued, self._trained, self._dropped = issued, trained, dropped
        self._open.clear()
        self._ready.clear()
        self._given_back = deque(pending)


def load_source(spec: str, config: Config) -> DataSource:
    """The task source of ``--data-source-path``: the class that ``spec`` names, made with ``config``.
    Raises ConfigError: it cannot be found.
    Raises DataError: it is no data source."""
    source = load_object(spec, "--data-source-path")(config)
    if not isinstance(source, DataSource):
        raise DataError(
            f"--data-source-path {spec}: {type(source).__name__} needs the methods get_samples(num_samples) and "
            "add_samples(samples)."
        )
    return source
