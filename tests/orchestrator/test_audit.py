"""The audit finds each way in which a run may have lost or doubled something, in runs made broken by hand."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.data.account import TaskAccount
from agentrl.data.checkpoint import CheckpointStore
from agentrl.data.files import write_json, write_jsonl
from agentrl.data.run_folder import RunDir
from agentrl.data.store import TrajectoryStore
from agentrl.evaluation.metrics import summarize
from agentrl.orchestrator.audit import audit, left_behind
from agentrl.tasks.source import TaskSource
from agentrl.types import Segment, Task, Trajectory
from tests.orchestrator.scripted import Trainer

STEPS, BATCH = 3, 2


def episode(group: Any, version: int, number: int = 0) -> Trajectory:
    mask = np.array([0, 1, 1], np.int8)
    segment = Segment(
        np.arange(3, dtype=np.int32), mask, np.zeros(3, np.float32), np.where(mask, version, -1).astype(np.int32), 1
    )
    name = f"{group.group_id}-{number}"
    return Trajectory(name, group.group_id, group.task, [segment], [], success=True, advantage=0.5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, of which nothing is wrong, as it stands on the disk."""
    base = tmp_path_factory.mktemp("whole")
    cfg = load_config(["--env", "search", "--output-dir", str(base / "run"), "--no-tensorboard"])
    account, checkpoints = TaskAccount(TaskSource("search", 100)), CheckpointStore(base / "run" / "checkpoints")
    folder = RunDir.create(cfg)
    with folder:
        for step in range(STEPS):
            groups = account.get_samples(BATCH)
            folder.store.write(step, [episode(group, step, n) for group in groups for n in range(2)])
            account.mark_trained(group.group_id for group in groups)
            folder.log_metrics(step + 1, {"time/step": 1.0})
        account.get_samples(1)  # was in flight
        (dropped,) = account.get_samples(1)
        account.drop([dropped.group_id])
        folder.log_evaluation(STEPS, {"search": summary(1)})

        class Account:
            async def state(self, folder: Path) -> dict[str, Any]:
                return {"buffer": account.state_dict()}

        asyncio.run(checkpoints.save(STEPS, trainer=Trainer(), rollout=Account()))  # type: ignore[arg-type]
    return folder.path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def summary(successes: int) -> dict[str, Any]:
    done = [Trajectory(f"e{i}", f"g{i}", Task(f"t{i}", i), [], [], success=i < successes) for i in range(2)]
    return summarize("search", "test", done, 1.0).to_dict()


def test_a_run_that_lost_nothing(run: Path) -> None:
    assert audit(run, least_success=0.5) == []


def rewrite(run: Path, step: int, change: Callable[[list[Trajectory]], list[Trajectory]]) -> None:
    store = TrajectoryStore(run / "trajectories")
    store.write(step, change(list(store.read("train", step=step))))


def in_metrics(change: Callable[[list[dict]], list[dict]]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / "metrics.jsonl"
        write_jsonl(file, change([json.loads(line) for line in file.read_text().splitlines()]))

    return apply


def trained_again(run: Path) -> None:
    first = list(TrajectoryStore(run / "trajectories").read("train", step=0))[0]
    again = episode(first, 2)
    rewrite(run, 2, lambda episodes: [*episodes, again])


def task_in_two_groups(run: Path) -> None:
    def change(episodes: list[Trajectory]) -> list[Trajectory]:
        episodes[0].task = next(TrajectoryStore(run / "trajectories").read("train", step=0)).task
        return episodes

    rewrite(run, 1, change)


def version(value: int) -> Callable[[Path], None]:
    def change(episodes: list[Trajectory]) -> list[Trajectory]:
        for each in episodes:
            each.segments[0].versions[1:] = value
        return episodes

    return lambda run: rewrite(run, 1, change)


def version_back(run: Path) -> None:
    def change(episodes: list[Trajectory]) -> list[Trajectory]:
        episodes[0].segments[0].versions[1:] = [1, 0]
        return episodes

    rewrite(run, 1, change)


def in_account(**changes: Any) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        """As if the manager had written this: with its checksum."""
        checkpoints = CheckpointStore(run / "checkpoints")
        old = checkpoints.newest()
        state = json.loads((old.path / "rollout.json").read_text())
        buffer = state["buffer"]
        buffer |= {name: value(buffer[name]) for name, value in changes.items()}
        folder = checkpoints.begin(old.step)
        write_json(folder / "rollout.json", state)
        checkpoints.commit(old.step)

    return apply


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a step was trained twice": (in_metrics(lambda m: [*m[:2], m[1], *m[2:]]), "1 twice .step 2"),
    "a step is missing": (in_metrics(lambda m: [m[0], *m[2:]]), "1 missing .step 2"),
    "a step beyond the checkpoint": (in_metrics(lambda m: [*m, {**m[0], "step": 9}]), "beyond the checkpoint .step 9"),
    "steps out of order": (in_metrics(lambda m: [m[1], m[0], *m[2:]]), "out of order"),
    "a torn line": (lambda run: (run / "metrics.jsonl").open("a").write("{\n"), "metrics.jsonl"),
    "a rollout is not stored": (
        lambda run: (run / "trajectories" / "train-000001.parquet").unlink(),
        "episodes of rollout 1 are not stored",
    ),
    "a group was trained twice": (trained_again, "1 groups were trained in several rollouts: g00000000 in .0, 2."),
    "a task was trained in two groups": (task_in_two_groups, "1 tasks were trained in several groups"),
    "an episode is stored twice": (
        lambda run: rewrite(run, 1, lambda episodes: [*episodes, episodes[0]]),
        "1 episodes are stored twice",
    ),
    "a group was lost": (
        lambda run: rewrite(run, 1, lambda episodes: episodes[:2]),
        "2 groups are neither trained nor open, and the account reports 1 as dropped",
    ),
    "the account lost a group": (in_account(trained=lambda n: n - 1), "says 5 groups were trained, the episodes say 6"),
    "a trained group is open": (
        in_account(open=lambda o: [*o, {**o[0], "group_id": "g00000000"}]),
        "1 trained groups will be handed out again: g00000000",
    ),
    "a group that nobody handed out": (in_account(issued=lambda n: 3), "3 groups that were never handed out"),
    "weights of the future": (version(2), "of rollout 1 was sampled by versions 2 to 2"),
    "weights that stood still": (version(0), "of rollout 1 was sampled by versions 0 to 0"),
    "a rollout by older weights": (version(9), "rollout 2 was sampled by older weights than one before it"),
    "weights that went back": (version_back, "the versions of its tokens go back"),
    "a half-written file": (lambda run: (run / "checkpoints" / "step_000004.tmp").mkdir(), "left over: checkpoints/"),
    "no checkpoint": (lambda run: (run / "checkpoints").rename(run / "gone"), "the account cannot be read"),
    "it learned nothing": (
        lambda run: write_jsonl(run / "evaluations.jsonl", [{"step": STEPS, "sets": {"search": summary(0)}}]),
        "held-out success of search is 0.0% after step 3",
    ),
    "it was not evaluated": (lambda run: (run / "evaluations.jsonl").unlink(), "no evaluation after the last step, 3"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_it_finds(run: Path, what: str) -> None:
    breaking, expected = BROKEN[what]
    breaking(run)
    assert any(re.search(expected, found) for found in audit(run, least_success=0.5)), audit(run)


def test_files_left_behind(tmp_path: Path) -> None:
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    shared.mkdir()
    (shared / "of another").touch()
    before = list(shared.glob("*"))
    assert left_behind(temporary, before, shared) == []
    (temporary / "agentrl-run-x").mkdir()
    (shared / "sem.x").touch()
    (shared / f"agentrl-weights-{os.getpid()}-x").mkdir()  # of another run, which goes on
    (shared / "agentrl-weights-999999999-x").mkdir()
    (shared / "torch_y").write_bytes(bytes(4096))
    with (shared / "torch_y").open("r+b") as file:
        held = mmap.mmap(file.fileno(), 4096)  # of another run, too
    assert left_behind(temporary, before, shared) == [
        f"left over: {temporary / 'agentrl-run-x'}",
        f"left over: {shared / 'agentrl-weights-999999999-x'}",
        f"left over: {shared / 'sem.x'}",
    ]
    held.close()
    assert f"left over: {shared / 'torch_y'}" in left_behind(temporary, before, shared)
