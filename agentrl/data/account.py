"""The buffer between tasks and training, and the account it keeps of every task.

A draw is one task handed out to be rolled out as one group. Each draw is in exactly one state:

    to come ──▶ in flight ──▶ ready ──▶ trained
                    │  ▲         │
            dropped ◀┘  └ given back

What was handed out and is not listed as in flight, ready, given back or dropped has been trained, so
the account does not grow with the run. Saved state holds no trajectories: what was in flight, ready or given
back is handed out again, under the same group id, before anything new.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
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
class Draw:
    """One task handed out. ``group_id`` is unique in the run and stays the task's when it is handed out again."""

    group_id: str
    task: Task


class DataBuffer:
    """Hands out tasks, takes back groups, and accounts for each draw.

    Not thread-safe: it belongs to the one process that manages rollouts.
    """

    def __init__(self, source: DataSource):
        self.source = source
        self._issued = 0
        self._trained = 0
        self._dropped = 0
        self._in_flight: OrderedDict[str, Draw] = OrderedDict()
        self._given_back: deque[Draw] = deque()
        self._ready: OrderedDict[str, Group] = OrderedDict()

    def get_samples(self, num_samples: int) -> list[Draw]:
        """The next draws, now in flight: first what was given back, then new tasks.

        Returns:
            ``num_samples`` draws; fewer only when the source has no more tasks.
        """
        draws = [self._given_back.popleft() for _ in range(min(num_samples, len(self._given_back)))]
        missing = num_samples - len(draws)
        if missing > 0:
            for task in self.source.get_samples(missing):
                if not isinstance(task, Task):
                    raise DataError(
                        f"{type(self.source).__name__}.get_samples gave {type(task).__name__}, expected agentrl.Task"
                    )
                draws.append(Draw(f"g{self._issued:08d}", task))
                self._issued += 1
        self._in_flight.update((draw.group_id, draw) for draw in draws)
        return draws

    def add_samples(self, samples: Iterable[Group]) -> None:
        """Groups that finished: from in flight to ready. Raises DataError on one that was not in flight."""
        groups = list(samples)
        for group in groups:
            self._take_in_flight(group.group_id)
            self._ready[group.group_id] = group
        self.source.add_samples(groups)

    def take(self, n: int) -> list[Group]:
        """The ``n`` oldest ready groups, which stay in the account until :meth:`mark_trained`.

        Raises:
            DataError: Fewer than ``n`` are ready.
        """
        if n > len(self._ready):
            raise DataError(f"{n} groups asked for, {len(self._ready)} are ready")
        groups = [self._ready.pop(group_id) for group_id in list(self._ready)[:n]]
        self._in_flight.update((g.group_id, Draw(g.group_id, g.task)) for g in groups)
        return groups

    def mark_trained(self, group_ids: Iterable[str]) -> None:
        """The optimizer step over these groups is done. Raises DataError on one that is not in flight or ready."""
        for group_id in group_ids:
            if self._ready.pop(group_id, None) is None:
                self._take_in_flight(group_id)
            self._trained += 1

    def give_back(self, group_ids: Iterable[str]) -> None:
        """These were not finished (an abort, a dead engine): they are handed out again, before anything new."""
        self._given_back.extend([self._take_in_flight(group_id) for group_id in group_ids])

    def drop(self, group_ids: Iterable[str]) -> None:
        """Give these up for good, after the retries of infrastructure errors; counted."""
        for group_id in group_ids:
            self._take_in_flight(group_id)
            self._dropped += 1

    def _take_in_flight(self, group_id: str) -> Draw:
        draw = self._in_flight.pop(group_id, None)
        if draw is None:
            raise DataError(f"Group {group_id} is not in flight: it was trained, dropped or never handed out.")
        return draw

    @property
    def counts(self) -> dict[str, int]:
        """Draws by state; ``issued`` is the sum of the others."""
        return {
            "issued": self._issued,
            "in_flight": len(self._in_flight),
            "given_back": len(self._given_back),
            "ready": len(self._ready),
            "trained": self._trained,
            "dropped": self._dropped,
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state: position, counts, and every draw that is neither trained nor dropped."""
        open_draws = [*self._given_back, *self._in_flight.values()]
        open_draws += [Draw(group.group_id, group.task) for group in self._ready.values()]
        state: dict[str, Any] = {
            "issued": self._issued,
            "trained": self._trained,
            "dropped": self._dropped,
            "open": [
                {"group_id": d.group_id, "task": dataclasses.asdict(d.task)}
                for d in sorted(open_draws, key=lambda d: d.group_id)
            ],
        }
        if hasattr(self.source, "state_dict"):
            state["source"] = self.source.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; open draws are handed out first. Raises DataError when it does not add up."""
        open_draws = [Draw(d["group_id"], Task(**d["task"])) for d in state["open"]]
        issued, trained, dropped = int(state["issued"]), int(state["trained"]), int(state["dropped"])
        if issued != trained + dropped + len(open_draws):
            raise DataError(
                f"The saved account does not add up: {issued} issued, {trained} trained, {dropped} dropped, "
                f"{len(open_draws)} open."
            )
        if hasattr(self.source, "load_state_dict") and "source" in state:
            self.source.load_state_dict(state["source"])
        self._issued, self._trained, self._dropped = issued, trained, dropped
        self._in_flight.clear()
        self._ready.clear()
        self._given_back = deque(open_draws)


def load_source(spec: str, config: Config) -> DataSource:
    """The task source of ``--data-source-path``: the class that ``spec`` names, made with ``config``.

    Raises:
        ConfigError: It cannot be found.
        DataError: It is no data source.
    """
    source = load_object(spec, "--data-source-path")(config)
    if not isinstance(source, DataSource):
        raise DataError(
            f"--data-source-path {spec}: {type(source).__name__} needs the methods get_samples(num_samples) and "
            "add_samples(samples)."
        )
    return source
