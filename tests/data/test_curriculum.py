"""Tasks are chosen by how often they were solved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.config.schema import Config
from agentrl.data.account import TaskAccount
from agentrl.data.curriculum import Curriculum, Success, frontier, load_curriculum
from agentrl.errors import ConfigError, EnvError
from agentrl.tasks.source import TaskSource
from agentrl.types import Group, StopReason, Task, Trajectory


@pytest.fixture(scope="module")
def cfg() -> Config:
    return load_config(["--env", "search", "--curriculum-path", "frontier"])


def played(task: Task, *successes: bool | None) -> Group:
    """Of a task; None: its episode failed for reasons of infrastructure."""
    return Group(
        "g",
        task,
        [
            Trajectory(
                f"e{i}", "g", task, [], [], success=won,
                stop_reason=StopReason.ENV_ERROR if won is None else StopReason.DONE,
            )
            for i, won in enumerate(successes)
        ],
    )  # fmt: skip


def test_the_frontier_is_what_was_solved_about_half_of_the_time(cfg: Config) -> None:
    tasks = [Task(name, 0) for name in ("solved", "never", "half", "new", "third")]
    success = {"solved": Success(8, 8, 1.0), "never": Success(8, 0, 0.0), "half": Success(8, 4, 0.5),
               "third": Success(9, 3, 0.3)}  # fmt: skip
    assert [task.task_id for task in frontier(cfg, tasks, success, 3)] == ["half", "new", "third"]


def test_tasks_that_are_always_solved_are_passed_over_and_a_run_that_goes_on_does_so_too(cfg: Config) -> None:
    def account() -> TaskAccount:
        return TaskAccount(Curriculum(cfg, TaskSource("search", 16), load_curriculum("frontier")))

    def play(account: TaskAccount, rounds: int) -> list[str]:
        """Tasks with an even number are always solved, others half of the time."""
        names = []
        for _ in range(rounds):
            for pending in account.get_samples(4):
                number = int(pending.task.task_id.rpartition("/")[2])
                group = played(pending.task, True, number % 2 == 0, None)
                group.group_id = pending.group_id
                account.add_samples([group])
                account.mark_trained([pending.group_id])
                names.append(pending.task.task_id)
        return names

    straight = account()
    first = play(straight, 6)
    state = json.loads(json.dumps(straight.state_dict()))
    later = play(straight, 4)
    assert all(int(name.rpartition("/")[2]) % 2 for name in later) and len({*first}) > 8
    again = account()
    again.load_state_dict(state)
    assert play(again, 4) == later
    without = TaskAccount(TaskSource("search", 16))
    without.load_state_dict(state)
    assert len(without.get_samples(4)) == 4


def test_a_source_that_ends_is_handed_out_to_its_end(cfg: Config) -> None:
    class Five:
        left = [Task(f"t/{n}", n) for n in range(5)]

        def get_samples(self, num_samples: int) -> list[Task]:
            taken, self.left = self.left[:num_samples], self.left[num_samples:]
            return taken

        def add_samples(self, samples: list[Group]) -> None: ...

    source = Curriculum(cfg, Five(), frontier)
    assert [len(source.get_samples(1)) for _ in range(3)] == [1, 1, 0]


def test_a_function_of_ones_own(tmp_path: Path, cfg: Config) -> None:
    (tmp_path / "mine.py").write_text(
        "def easy(args, tasks, success, num_samples):\n"
        "    known = [t for t in tasks if t.task_id in success and success[t.task_id].last > 0.5]\n"
        "    return (known or tasks)[:num_samples]\n"
        "def none(args, tasks, success, num_samples): return []\n"
        "def twice(args, tasks, success, num_samples): return [tasks[0], tasks[0]]\n"
        "def ids(args, tasks, success, num_samples): return [t.task_id for t in tasks]\n"
        "def writes(args, tasks, success, num_samples): success['a'] = 1\n"
    )
    source = Curriculum(cfg, TaskSource("search", 8), load_curriculum(f"{tmp_path / 'mine.py'}:easy"))
    (task,) = source.get_samples(1)
    source.add_samples([played(task, True, True)])
    assert task in [source.get_samples(1)[0] for _ in range(3)], "in the next epoch"
    for name, problem in {
        "none": "returned 0 tasks; expected 1 to 2 different ones",
        "twice": "returned 2 tasks; expected 1 to 2 different ones",
        "ids": "expected some of the tasks",
        "writes": "mine.py:writes: TypeError",
    }.items():
        with pytest.raises(EnvError, match=problem):
            Curriculum(cfg, TaskSource("search", 8), load_curriculum(f"{tmp_path / 'mine.py'}:{name}")).get_samples(2)
    with pytest.raises(ConfigError, match="expected frontier, or a function of your own"):
        load_curriculum("hard")
