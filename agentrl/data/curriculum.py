"""Which tasks are handed out next, from how often each was solved: ``--curriculum-path``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.data.episodes import by_episode, is_error, solved
from agentrl.data.rules import choosing, own_function
from agentrl.tasks.source import DataSource
from agentrl.types import Group, Task

if TYPE_CHECKING:
    from agentrl.config.schema import Config

CANDIDATES = 4
"""Tasks among which one is chosen."""

REMEMBERED = 100_000
"""Tasks whose success is remembered: those that were played last."""


@dataclass(frozen=True)
class Success:
    """How a task went so far: its ``episodes``, how many were ``solved``, and the share of the ``last`` group."""

    episodes: int
    solved: int
    last: float

    @property
    def share(self) -> float:
        """Of all episodes, those that solved it."""
        return self.solved / self.episodes


Choose = Callable[["Config", list[Task], Mapping[str, Success], int], Sequence[Task]]
"""``curriculum(args, tasks, success, num_samples)``: at most ``num_samples`` of ``tasks``, in the order in which they
are handed out; ``success`` by task id, of those that were played."""


def frontier(args: Config, tasks: list[Task], success: Mapping[str, Success], num_samples: int) -> list[Task]:
    """Tasks that were solved about half of the time, where the episodes of a group differ most. One that was not played
    yet counts as such."""

    def distance(task: Task) -> float:
        known = success.get(task.task_id)
        return abs(known.share - 0.5) if known else 0.0

    return sorted(tasks, key=distance)[:num_samples]


def load_curriculum(spec: str) -> Choose:
    """``frontier``, or a function by path: what that raises, or returns that is none of the tasks, is an EnvError that
    names it. Raises ConfigError: there is none of this name."""
    if spec == "frontier":
        return frontier
    form = "takes (args, tasks, success, num_samples) and returns some of the tasks"
    function = own_function("--curriculum-path", spec, ["frontier"], form)
    return choosing(function, f"--curriculum-path {spec}", "tasks", least=1)


class Curriculum:
    """A data source that hands out those tasks of another that ``choose`` takes, of :data:`CANDIDATES` times as many.
    The rest is passed over: where the source goes through its tasks again and again, they come in its next epoch."""

    def __init__(self, cfg: Config, source: DataSource, choose: Choose):
        self._cfg, self._source, self._choose = cfg, source, choose
        self._success: dict[str, Success] = {}

    def get_samples(self, num_samples: int) -> list[Task]:
        """The next tasks, at most ``num_samples``; none when the source has no more. Raises EnvError."""
        tasks = self._source.get_samples(CANDIDATES * num_samples)
        if not tasks:
            return []
        return list(self._choose(self._cfg, tasks, MappingProxyType(self._success), min(num_samples, len(tasks))))

    def add_samples(self, samples: list[Group]) -> None:
        """Groups that finished."""
        for group in samples:
            results = [solved(e) for e in by_episode(group.trajectories) if not is_error(e)]
            if not results:
                continue
            before = self._success.pop(group.task.task_id, Success(0, 0, 0.0))
            self._success[group.task.task_id] = Success(
                before.episodes + len(results), before.solved + sum(results), sum(results) / len(results)
            )
            if len(self._success) > REMEMBERED:
                del self._success[next(iter(self._success))]
        self._source.add_samples(samples)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state: the source's, and the success of tasks; a run may go on without a curriculum."""
        of_source = self._source.state_dict() if hasattr(self._source, "state_dict") else {}
        return of_source | {"success": {name: astuple(known) for name, known in self._success.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises what the source raises."""
        self._success = {name: Success(*known) for name, known in state.get("success", {}).items()}
        if hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict({name: value for name, value in state.items() if name != "success"})
