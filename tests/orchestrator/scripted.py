"""``agentrl train`` without engines and ranks: driver, run folder, checkpoints and the account of tasks are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.algorithms import TrainBatch
from agentrl.config import load_config
from agentrl.data.account import TaskAccount
from agentrl.data.deaths import FailedTasks
from agentrl.data.files import atomic_file, atomic_folder
from agentrl.data.store import TrajectoryStore
from agentrl.data.writes import Writes
from agentrl.engines.world import World
from agentrl.evaluation.metrics import summarize
from agentrl.orchestrator import launch as driver
from agentrl.orchestrator.manager import Generated
from agentrl.tasks.source import TaskSource
from agentrl.types import Task, Trajectory

BATCH = 2
FLAGS = ("--env", "search", "--no-tensorboard", "--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "2")


_SOLVED = [Trajectory("e", "g", Task("t", 0), [], [], success=True)]
SUMMARY = summarize("search", "test", _SOLVED, 1.0).to_dict()


class Trainer:
    """Its weights are the ids of the groups it was trained on."""

    ranks = ()

    def __init__(self) -> None:
        self.weights: list[str] = []
        self.writes = Writes(later=True)

    async def begin(self) -> None: ...

    async def ready(self) -> None: ...

    num_steps = 1

    async def publish(self, version: int) -> int:
        return version

    async def fetch(self, batch: list[str]) -> TrainBatch:
        return TrainBatch.from_groups([], ())

    async def infer(self, batch: list[str], names: Any) -> dict[str, Any]:
        return {}

    async def update(self, batch: list[str], columns: Any, **how: bool) -> tuple[dict[str, float], dict[str, Any]]:
        self.weights += batch
        return {"train/grad_norm": 1.0}, {}

    async def save(self, path: Path, *, later: bool = False) -> None:
        path.mkdir()
        writes = self.writes if later else Writes()
        writes(partial(Path.write_text, data=json.dumps(self.weights)), path / "weights.json")

    async def write(self) -> None:
        await asyncio.to_thread(self.writes.finish)

    async def load(self, path: Path) -> None:
        self.weights = json.loads((path / "weights.json").read_text())

    async def save_hf(self, path: Path, *, later: bool = False) -> None:
        writes, weights = self.writes if later else Writes(), json.dumps(self.weights)

        def export(path: Path) -> None:
            with atomic_folder(path) as folder:
                (folder / "config.json").write_text("{}")
                (folder / "model.safetensors").write_text(weights)

        writes(export, path)


class Rollout:
    """The manager's work on the disk, with the real account. A part holds the ids of its groups."""

    manager = None

    def __init__(self, run_dir: Path) -> None:
        self.store = TrajectoryStore(run_dir / "trajectories")
        self.account = TaskAccount(TaskSource("search", 100))
        self.failed = FailedTasks(run_dir / "failed_tasks.json")
        self.evaluated: list[int] = []

    async def start(self) -> list[str]:
        return []

    async def close(self, seconds: float) -> None: ...

    async def update_weights(self, snapshot: Any) -> dict[str, float]:
        return {}

    async def generate(self, step: int, *, progress: Any) -> Generated:
        self._drawn = self.account.get_samples(BATCH)
        self._write("train", step, [d.group_id for d in self._drawn])
        names = ("rollout/reward", "rollout/success", "rollout/turns", "rollout/tokens_per_s")
        return Generated(dict.fromkeys(names, 1.0), [d.group_id for d in self._drawn])

    async def mark_trained(self, columns: Any) -> None:
        self.account.mark_trained(d.group_id for d in self._drawn)

    async def evaluate(self, step: int, *, progress: Any) -> dict[str, Any]:
        self.evaluated.append(step)
        self._write("eval-search", step, [])
        return {"search": SUMMARY}

    def _write(self, name: str, step: int, groups: list[str]) -> None:
        with atomic_file(self.store.part_path(name, step)) as stream:
            stream.write(json.dumps(groups).encode())

    async def state(self, folder: Path) -> dict[str, Any]:
        return {"buffer": self.account.state_dict()}

    async def load_state(self, state: dict[str, Any], folder: Path) -> None:
        self.account.load_state_dict(state["buffer"])


def _plot(path: Path, *args: Any, **kwargs: Any) -> None:
    with atomic_file(path) as stream:
        stream.write(b"a curve")


def leave_out_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver starts no Ray, no warden and no engines."""
    nothing = SimpleNamespace(
        processes=lambda *pids: {}, actor=lambda *who: None, world=World(), scratch=contextlib.nullcontext,
        has_lost=False, check_sees=lambda *files: None,
    )  # fmt: skip
    for name in ("Warden", "weights_folder", "start_engines_ahead", "Cluster", "Watch", "stderr_to"):
        monkeypatch.setattr(driver, name, lambda *args, **kwargs: contextlib.nullcontext(nothing))


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rollout]:
    """``train(*flags)`` is ``agentrl train`` with these; returns the rollouts' end."""
    made: list[Rollout] = []

    def start_actors(cfg: Any, cluster: Any, run: Any, weights_dir: str) -> tuple[Trainer, Rollout]:
        made.append(Rollout(run.path))
        return Trainer(), made[-1]

    leave_out_processes(monkeypatch)
    monkeypatch.setattr(driver, "installed", dict)
    monkeypatch.setattr(driver, "start_actors", start_actors)
    monkeypatch.setattr(driver, "check_environment", lambda cfg: None)
    monkeypatch.setattr(driver, "report", lambda run, progress: run.plot_reward())
    monkeypatch.setattr("agentrl.data.run_folder.plot_reward", _plot)
    monkeypatch.setattr("agentrl.data.run_folder.installed", dict)
    monkeypatch.setattr("agentrl.data.run_folder.git_state", lambda folder: None)

    def call(*flags: str) -> Rollout | None:
        made.clear()
        assert driver.train(load_config([*flags])) == 0
        return made[-1] if made else None

    return call


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_run(folder: Path, steps: int, *, first: int = 0, every: int = 1, checkpoints: Path | None = None) -> None:
    """Every step and every evaluation is there once, every task was trained once, and nothing is left over."""
    metrics = lines(folder / "metrics.jsonl")
    evaluated = [n for n in range(first, steps + 1) if every and n % every == 0]
    assert [m["step"] for m in metrics if "train/grad_norm" in m] == list(range(first + 1, steps + 1))
    assert [m["step"] for m in metrics if "eval/search/success" in m] == evaluated
    assert [e["step"] for e in lines(folder / "evaluations.jsonl")] == evaluated
    store = TrajectoryStore(folder / "trajectories", read_only=True)
    assert [part.step for part in store.parts("train")] == list(range(first, steps))
    assert [part.step for part in store.parts("eval-search")] == evaluated
    trained = [group for part in store.parts("train") for group in json.loads(part.path.read_text())]
    assert trained == [f"g{n:08d}" for n in range(first * BATCH, steps * BATCH)]
    newest = driver.CheckpointStore(checkpoints or folder / "checkpoints").newest()
    assert newest.step == steps
    weights = json.loads((newest.path / "trainer" / "weights.json").read_text())
    assert weights == [f"g{n:08d}" for n in range(steps * BATCH)]
    left = [p for p in (checkpoints or folder).parent.rglob("*") if p.suffix in (".tmp", ".removed", ".partial")]
    assert not left, left
    assert (folder / "reward.png").is_file()


class Kill:
    """Ends this process before the n-th change of the file system below ``root``; 0: never, changes are counted."""

    active: Kill | None = None

    def __init__(self, root: Path, at: int) -> None:
        self.root, self.at, self.count = str(root), at, 0

    def event(self) -> None:
        self.count += 1
        if self.count == self.at:
            os._exit(KILLED)

    @classmethod
    def audit(cls, event: str, args: tuple[Any, ...]) -> None:
        if cls.active is None or (event != "open" and event not in _CHANGES):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        path = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
        # A name alone is one within a folder that is being removed.
        if path.startswith(cls.active.root) or (path and "/" not in path):
            cls.active.event()


_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "os.symlink"}
KILLED = 77
sys.addaudithook(Kill.audit)


def in_child(work: Callable[[], None], folder: Path, *, kill: Kill | None = None) -> tuple[int, str]:
    """Do something in a process of its own; returns its exit status and what it raised."""
    told = folder.parent / f"{folder.name}.told"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            sync = os.fsync

            def fsync(descriptor: int) -> None:
                if kill is not None:
                    kill.event()
                sync(descriptor)

            os.fsync = fsync
            Kill.active = kill
            work()
            Kill.active = None
            told.write_text(str(kill.count) if kill else "")
            os._exit(0)
        except BaseException:
            Kill.active = None
            told.write_text(traceback.format_exc())
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), told.read_text() if told.exists() else ""
