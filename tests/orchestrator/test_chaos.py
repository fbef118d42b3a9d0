"""The schedule of faults, whom they meet, and what an injector does to real processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from agentrl.config import load_config
from agentrl.orchestrator import chaos
from agentrl.orchestrator.chaos import Fault, Injector, Verdict, report, role_of, schedule, victim
from agentrl.processes.tree import descendants, is_running


def fault(kind: str = "kill", *, pause: float = 0.0, hasty: float = 1.0, seconds: float = 0.0) -> Fault:
    return Fault(kind, pause, hasty, role=0.0, process=0.0, seconds=seconds)


def test_the_schedule_follows_from_its_seed() -> None:
    first, again, other = (list(itertools.islice(schedule(seed), 200)) for seed in (1, 1, 2))
    assert first == again != other
    kinds = Counter(each.kind for each in first)
    assert kinds["kill"] > 120 and kinds["hang"] > 10 and kinds["delay"] > 10
    assert all(45 <= each.seconds <= 60 for each in first if each.kind == "hang")


def test_each_role_that_runs_is_as_likely_as_any_other() -> None:
    this = psutil.Process()
    running = [("rank", this), *[("server", this)] * 7, ("GCS", this)]
    met = Counter(each[0] for f in itertools.islice(schedule(3), 600) if (each := victim(f, running)))
    assert set(met) == {"rank", "server", "GCS"} and min(met.values()) > 150
    assert victim(fault(), []) is None


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m agentrl.cli.main train --env search", "driver"),
        ("python -m agentrl.cli.main serve-retriever --port 8000", "retriever"),
        ("ray::TrainActor.update", "rank"),
        ("ray::RolloutManager", "manager"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "GCS"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "raylet"),
        ("sglang::scheduler", "scheduler"),
        ("ray::IDLE", None),
        ("python -c from multiprocessing.resource_tracker import main", None),
    ],
)
def test_roles(command: str, role: str | None) -> None:
    assert role_of(command) == role


class Run:
    """A "supervisor" with one child that bears the mark of a role, of two such in a row, and what the injector did."""

    def __init__(self, *faults: Fault, mark: str = "ray::TrainActor"):
        child = f"import subprocess, sys\nfor _ in 'ab': subprocess.run([sys.executable, '-c', 'input()', '{mark}'])"
        self.process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
        self.step, self.done = 0.0, list[str]()
        self.injector = Injector(
            lambda: chaos.processes_of(self.process.pid),
            lambda: self.step,
            iter(faults),
            lambda f, role, pid: self.done.append(f"{f.kind} {role}"),
        )
        until(lambda: bool(chaos.processes_of(self.process.pid)))
        ((_, self.rank),) = chaos.processes_of(self.process.pid)

    def turn_until(self, condition) -> None:
        until(lambda: bool(self.injector.turn() or condition()))

    def end(self) -> None:
        for each in descendants(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


@pytest.fixture
def run() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for each in runs:
        each.end()


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_kill_waits_for_a_step_and_its_pause(run: list[Run]) -> None:
    run.append(made := Run(fault(pause=0.2 / chaos.PAUSE_S)))
    for _ in range(20):
        made.injector.turn()
    assert made.done == [] and made.rank.is_running()
    made.step = began = time.time()
    made.turn_until(lambda: made.done)
    assert time.time() - began > 0.19 and made.done == ["kill rank"]
    until(lambda: not is_running(made.rank))


@pytest.mark.parametrize(
    ("mark", "role", "hasty"), [("ray::TrainActor", "rank", 0.2), ("sglang::scheduler", "scheduler", 0.4)]
)
def test_a_hasty_kill_waits_for_no_step(run: list[Run], mark: str, role: str, hasty: float) -> None:
    run.append(made := Run(fault(), fault(hasty=hasty), fault(hasty=0.9), mark=mark))
    made.step = time.time()
    made.turn_until(lambda: len(made.done) == 2)
    for _ in range(20):
        made.injector.turn()
    assert made.done == [f"kill {role}"] * 2, "the third waits for a step"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is for an injector: a stopped process is seen before its time is up, however slow the machine is."""
    now = [time.time()]
    monkeypatch.setattr(chaos, "time", SimpleNamespace(time=lambda: now[0]))
    return now


def test_a_delayed_process_goes_on(run: list[Run], clock: list[float]) -> None:
    run.append(made := Run(fault("delay", seconds=60)))
    made.step = clock[0]
    made.turn_until(lambda: made.rank.status() == psutil.STATUS_STOPPED)
    clock[0] += 61
    made.turn_until(lambda: made.rank.status() != psutil.STATUS_STOPPED)
    assert is_running(made.rank)


def test_a_hung_process_is_killed_should_nobody_do_so_and_nothing_else_happens_meanwhile(
    run: list[Run], clock: list[float]
) -> None:
    run.append(made := Run(fault("hang", seconds=60), fault(hasty=0.0)))
    made.step = clock[0]
    made.turn_until(lambda: made.rank.status() == psutil.STATUS_STOPPED)
    clock[0] += 61
    while is_running(made.rank):
        assert made.done == ["hang rank"]
        made.injector.turn()


@pytest.mark.parametrize("mode", chaos.MODES)
def test_a_training_takes_the_options_of_its_mode(mode: str) -> None:
    cfg = load_config([*chaos.FLAGS, *chaos.MODES[mode]])
    assert cfg.auto_resume and (cfg.colocate, bool(cfg.async_buffer_size)) == {
        "taking turns": (False, False),
        "asynchronous": (False, True),
        "co-located": (True, False),
        "partial rollouts": (False, True),
    }[mode]


def test_the_report_counts() -> None:
    said = report(Verdict(["kill rank", "kill rank", "hang GCS"], 2, 1, 9, []))
    assert said.startswith("3 faults, 2 of them kills, in 1 trainings of 9 steps, 2 restarts")
    assert "    2 kill rank\n" in said and said.endswith("nothing was lost, trained twice or left over")
    assert report(Verdict([], 0, 1, 9, ["run-0: x"])).endswith("wrong: run-0: x\nthe audit found faults")


def test_a_retriever_that_was_killed_is_started_again(tmp_path: Path) -> None:
    retriever = chaos.RetrieverServer(tmp_path / "retriever.txt")
    try:
        retriever.turn()
        ((role, first),) = chaos.processes_of(os.getpid())
        assert role == "retriever" and chaos.processes_of(os.getpid(), but=first.pid) == []
        first.kill()
        until(lambda: not is_running(first))
        retriever.turn()
        ((_, second),) = chaos.processes_of(os.getpid())
        assert second.pid != first.pid
    finally:
        retriever.close()
    assert chaos.processes_of(os.getpid()) == []
