"""Which tasks a run attempts, in which order: seeded, resumable, the same on every machine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from agentrl.errors import ConfigError, DataError
from agentrl.types import Group, Task, replace

_SEED_LIMIT = 2**31
_HELD_OUT_ORDER = 20_230_923  # not the run's seed: two runs must be compared on the same held-out tasks


@runtime_checkable
class DataSource(Protocol):
    """What ``--data-source-path`` names: an object that says what to attempt next.

    A class is made with the configuration as its only argument. ``state_dict`` and
    ``load_state_dict`` are optional; with them a resumed run goes on where it was.
    """

    def get_samples(self, num_samples: int) -> list[Task]:
        """The next tasks, at most ``num_samples``; fewer (or none) when there are no more."""

    def add_samples(self, samples: list[Group]) -> None:
        """Finished groups, for a source that learns from them."""


def env_label(spec: str) -> str:
    """Short name of an environment spec for ids and folders, the same on every machine.

    ``search`` stays; ``path/to/file.py:MyEnv`` and ``pkg.module:MyEnv`` become ``MyEnv``.
    """
    label = spec.rstrip("/").rpartition(":")[2].rpartition("/")[2]
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in label).strip("-.") or "env"


def task_seed(stream: str, seed: int, index: int) -> int:
    """Seed of task ``index``; distinct streams never share a sequence."""
    entropy = [seed, index, *stream.encode("utf-8")]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) % _SEED_LIMIT


def check_split(splits: Sequence[str], split: str, env: str) -> None:
    """Raises ConfigError when ``env`` has no split of that name."""
    if split not in splits:
        raise ConfigError(f"{env} has no split {split!r}; it has {', '.join(splits)}.")


def _task(env: str, split: str, index: int, seed: tuple[str, int], own: str | None) -> Task:
    """Task ``index`` of a split. One that has an id of its ``own`` (:meth:`agentrl.Env.id_of_task`) has its seed by
    that, wherever it stands. ``seed``: stream and seed of :func:`task_seed`."""
    number = index if own is None else int(hashlib.sha256(own.encode()).hexdigest()[:16], 16)
    return Task(
        task_id=f"{env_label(env)}/{split}/{index}" if own is None else own,
        seed=task_seed(*seed, number),
        split=split,
        options={"split": split, "index": index},
        env=env,
    )


def _drawn_task(env: str, split: str, seed: int) -> Task:
    return Task(
        task_id=f"{env_label(env)}/{split}/seed-{seed}", seed=seed, split=split, options={"split": split}, env=env
    )


class TaskSource:
    """Training tasks of one environment split, without end.

    A finite split is walked through epoch by epoch, each epoch in its own seeded order, every task once
    an epoch. An unlimited one is drawn by seed.

    Args:
        env: Spec of the environment, copied into each task.
        num_tasks: Size of the split; None when tasks are drawn from a seed.
        split: Name of the split.
        seed: Seed of the order.
        id_of_task: See :meth:`agentrl.Env.id_of_task`.
    """

    def __init__(
        self,
        env: str,
        num_tasks: int | None,
        *,
        split: str = "train",
        seed: int = 0,
        id_of_task: Callable[[str, int], str | None] = lambda split, index: None,
    ):
        if num_tasks is not None and num_tasks < 1:
            raise DataError(f"Environment {env!r} has no tasks in split {split!r}.")
        self.env = env
        self.num_tasks = num_tasks
        self.split = split
        self.seed = seed
        self.id_of_task = id_of_task
        self.cursor = 0
        self._order: tuple[int, np.ndarray] | None = None

    @classmethod
    def of_env(cls, spec: str, env: Any, *, split: str = "train", seed: int = 0) -> TaskSource:
        """The source over ``env``, an instance of what ``spec`` names. Raises ConfigError on an unknown split."""
        check_split(env.splits, split, f"Environment {spec!r}")
        return cls(spec, env.num_tasks(split), split=split, seed=seed, id_of_task=env.id_of_task)

    @property
    def epoch(self) -> int:
        """Times the whole split was gone through; 0 for an unlimited one."""
        return self.cursor // self.num_tasks if self.num_tasks else 0

    def next_groups(self, n: int) -> list[Task]:
        """The next ``n`` tasks."""
        tasks = [self._at(position) for position in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return tasks

    def get_samples(self, num_samples: int) -> list[Task]:
        """:meth:`next_groups` by the name of the data source contract."""
        return self.next_groups(num_samples)

    def add_samples(self, samples: list[Group]) -> None:
        """Nothing to learn: the order is fixed by the seed."""

    def _at(self, position: int) -> Task:
        if self.num_tasks is None:
            return _drawn_task(self.env, self.split, task_seed(self.split, self.seed, position))
        epoch, place = divmod(position, self.num_tasks)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_tasks))
        index = int(self._order[1][place])
        return _task(self.env, self.split, index, (self.split, self.seed), self.id_of_task(self.split, index))

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state; with it the rest of the order is determined."""
        return {
            "env": self.env,
            "split": self.split,
            "num_tasks": self.num_tasks,
            "seed": self.seed,
            "cursor": self.cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.
        Raises DataError: the split is of another size now, so positions in it mean other tasks."""
        for name in ("split", "num_tasks"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"The saved run drew its tasks from {name}={state[name]!r} of {state['env']!r}, now it is "
                    f"{getattr(self, name)!r} of {self.env!r}: the data changed. Start a new run, or put the old "
                    "data back."
                )
        self.seed, self.cursor = int(state["seed"]), int(state["cursor"])


def drawn_held_out_task(spec: str, split: str, number: int) -> Task:
    """Task ``number`` of a split without end, counted from 0 in the fixed list of :func:`held_out_tasks`."""
    return _drawn_task(spec, split, task_seed(f"held-out/{split}", 0, number))


def held_out_tasks(spec: str, env: Any, *, split: str = "test", limit: int | None = None) -> list[Task]:
    """The fixed list of held-out tasks of a split of ``env``, which ``spec`` names: the same for every run, seed and
    machine. At most ``limit``, which an unlimited split needs; a finite one is thinned by a fixed shuffle.
    Raises ConfigError: no such split, or an unlimited one without a limit.
    Raises DataError: the split is empty."""
    check_split(env.splits, split, f"Environment {spec!r}")
    available = env.num_tasks(split)
    if available is None:
        if limit is None:
            raise ConfigError(f"Split {split!r} of {spec!r} has no end: give --eval-tasks N.")
        return [drawn_held_out_task(spec, split, i) for i in range(limit)]
    if available < 1:
        raise DataError(
            f"Environment {spec!r} has no tasks in split {split!r}. Give it some (--env-arg test_data=FILE or "
            "test_fraction=0.1, if `agentrl env show` lists it), evaluate on others (--eval-prompt-data NAME PATH, "
            "--eval-env NAME), or not at all (--eval-interval 0)."
        )
    chosen: Sequence[int] = range(available)
    if limit is not None and limit < available:
        chosen = sorted(np.random.default_rng(_HELD_OUT_ORDER).permutation(available)[:limit].tolist())
    own = env.id_of_task
    tasks = [_task(spec, split, int(i), (f"held-out/{split}", 0), own(split, int(i))) for i in chosen]
    seen: Counter[str] = Counter()
    for place, task in enumerate(tasks):  # rows of equal content
        seen[task.task_id] += 1
        if seen[task.task_id] > 1:
            tasks[place] = replace(task, task_id=f"{task.task_id}-{seen[task.task_id]}")
    return tasks
