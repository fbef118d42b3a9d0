"""Trainings of the embedded model under a schedule of kills, hangs and delays of random processes, each audited.

The schedule follows from a seed; which process a fault meets, from the seed and from what runs at that moment. A fault
waits for a training step after the one before, so that the run comes to its end. A share does not: it meets a start,
or a part that is just being replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from agentrl.data.files import read_jsonl, to_json
from agentrl.orchestrator.audit import audit, left_behind
from agentrl.processes.server import free_port
from agentrl.processes.supervisor import end_leftovers
from agentrl.processes.tree import Process, adopt_orphans, descendants, die_with_parent, is_running

KINDS = {"kill": 8, "hang": 1, "delay": 1}
"""What happens to a process, and how often: SIGKILL; SIGSTOP, and SIGKILL should nobody have ended it; SIGSTOP, and
SIGCONT soon."""
HANG_S, DELAY_S, PAUSE_S, START_S = (45.0, 60.0), (0.5, 5.0), 5.0, 40.0
"""Seconds of a hang and of a delay; longest pause before a fault; within which one meets a start."""
FATAL = ("GCS", "raylet", "rank", "manager", "driver")
"""Roles without which a run ends and is started again. What has another role is replaced while the run goes on."""
HASTY = {"a start": 0.25, "a replacement": 0.5}
"""Share of faults that do not wait for a step after the one before, by what that one brought about."""
POLL_S = 0.2
LEAVING_S = 20.0
ROUND_S = 1800.0
"""Longest time of a training after its last fault."""
LEAST_SUCCESS = 0.9
"""Held-out success that the demo reaches without faults: 99 % or more with each of three seeds."""
RETRIEVER = "retriever"
ROLES = {
    "gcs_server": "GCS",
    "raylet": "raylet",
    "ray::TrainActor": "rank",
    "ray::RolloutManager": "manager",
    "ray::RolloutWorker": "rollout worker",
    "ray::EngineActor": "engine's actor",
    "agentrl.engines.router": "router",
    "sglang::scheduler": "scheduler",
    "sglang::detokenizer": "detokenizer",
    "agentrl.engines.server": "server",
    "agentrl.processes.warden": "warden",
    "agentrl.cli.main serve-retriever": RETRIEVER,
    "agentrl.cli.main": "driver",
}
"""Processes of a run, and its retrieval server, by what their command line holds."""
FLAGS = (
    *("--env", "search", "--save-interval", "1", "--eval-interval", "9", "--no-eval-before-train", "--no-tensorboard"),
    *("--auto-resume", "--auto-resume-max", "10", "--rollout-num-workers", "2"),
    # Hangs are to be noticed within the minute.
    *("--rollout-health-check-interval", "3", "--rollout-health-check-timeout", "8", "--train-stall-timeout", "30"),
)

OLD_TOKENS = ("--num-rollout", "12", "--eval-interval", "12")
"""Where tokens may be old it takes that many rollouts to learn as much."""
MODES: dict[str, tuple[str, ...]] = {
    "taking turns": (),
    "asynchronous": ("--async-buffer-size", "2", *OLD_TOKENS),
    "co-located": ("--colocate",),
    "partial rollouts": (
        *("--async-buffer-size", "1", "--partial-rollout", "--over-sampling-batch-size", "24"),
        *OLD_TOKENS,
    ),
}
"""How the trainings go, one after the other."""


@dataclass(frozen=True)
class Fault:
    """What happens next, and when.

    Attributes:
        pause: from 0 to 1, the share of the longest pause before it, after the step that it waits for.
        hasty: from 0 to 1, in which share of faults it is: those that wait for no step come first.
        role, process: from 0 to 1, which of the roles that run, and which process of that role.
        seconds: for which a stopped process stands still.
    """

    kind: str
    pause: float
    hasty: float
    role: float
    process: float
    seconds: float


def schedule(seed: int) -> Iterator[Fault]:
    """Faults without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        yield Fault(
            kind=kind,
            pause=rng.random(),
            hasty=rng.random(),
            role=rng.random(),
            process=rng.random(),
            seconds=rng.uniform(*(HANG_S if kind == "hang" else DELAY_S)),
        )


def role_of(command_line: str) -> str | None:
    """What a process is for the run; None for those that only serve others: forks, trackers, idle workers."""
    return next((role for mark, role in ROLES.items() if mark in command_line), None)


def victim(fault: Fault, processes: Sequence[tuple[str, Process]]) -> tuple[str, Process] | None:
    """Which process a fault meets: each role that runs is as likely as any other. None where nothing runs."""
    roles = sorted({role for role, _ in processes})
    if not roles:
        return None
    role = roles[int(fault.role * len(roles))]
    of_role = sorted((proc for name, proc in processes if name == role), key=lambda proc: proc.pid)
    return role, of_role[int(fault.process * len(of_role))]


def processes_of(parent: int, *, but: int | None = None) -> list[tuple[str, Process]]:
    """The processes with a role that descend from one, but for that one and another."""
    found = []
    for proc in descendants(parent, include_root=False):
        if proc.pid == but:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            line = Path(f"/proc/{proc.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if is_running(proc) and (role := role_of(line)):
                found.append((role, proc))
    return found


class Injector:
    """Does to the processes of a run what the schedule says.

    Args:
        processes: those that run, with their roles.
        last_step: when (``time.time()``) the run logged its last step; 0 before the first.
        faults: what is to happen.
        note: told of each fault that happened.
    """

    def __init__(
        self,
        processes: Callable[[], Sequence[tuple[str, Process]]],
        last_step: Callable[[], float],
        faults: Iterator[Fault],
        note: Callable[[Fault, str, int], None],
    ):
        self._processes, self._last_step, self._faults, self._note = processes, last_step, faults, note
        self._next: Fault | None = None
        self._ready: float | None = None
        self._at, self._met = 0.0, ""
        self._stopped: list[tuple[float, Process, Fault]] = []

    def turn(self) -> None:
        """Look once whether something is due."""
        self._resume()
        if self._next is None:
            self._next, self._ready = next(self._faults, None), None
        fault, now = self._next, time.time()
        if fault is None or any(f.kind == "hang" for _, _, f in self._stopped):
            return
        starts = self._met in FATAL
        hasty = fault.hasty < HASTY["a start" if starts else "a replacement"] and self._met != ""
        if self._ready is None and (hasty or self._last_step() > self._at):
            self._ready = now + fault.pause * (START_S if hasty and starts else PAUSE_S)
        if self._ready is None or now < self._ready:
            return
        met = victim(fault, self._processes())
        if met is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):  # it just ended
            met[1].send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            if fault.kind != "kill":
                self._stopped.append((now + fault.seconds, met[1], fault))
            self._note(fault, met[0], met[1].pid)
            self._next, self._at, self._met = None, now, met[0]

    def _resume(self) -> None:
        for entry in list(self._stopped):
            until, proc, fault = entry
            ended = not is_running(proc)
            if not ended and time.time() >= until:
                with contextlib.suppress(psutil.NoSuchProcess):
                    proc.send_signal(signal.SIGCONT if fault.kind == "delay" else signal.SIGKILL)
                ended = fault.kind == "delay"  # one that is killed counts until it is gone
            if ended:
                self._stopped.remove(entry)


class RetrieverServer:
    """The retrieval server that the trainings search in. Started again whenever it ended, as an init would.

    Args:
        log: what it says goes there.
    """

    def __init__(self, log: Path):
        self._log, self.port = log, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def turn(self) -> None:
        """Look once whether it runs."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "agentrl.cli.main", "serve-retriever", "--port", str(self.port)]
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
                )

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(LEAVING_S)


@dataclass(frozen=True)
class Verdict:
    """What came of it."""

    faults: list[str]
    """``kill rank`` and so on, in order."""
    restarts: int
    trainings: int
    steps: int
    problems: list[str]


def chaos(folder: Path, *, minutes: float, seed: int, kills: int | None, say: Callable[[str], None]) -> Verdict:
    """Train and break, until the time is over or so many faults have happened; the last training comes to its end. In
    ``folder`` are the runs, what each said, and ``faults.jsonl``."""
    adopt_orphans()
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * minutes
    happened: list[str] = []
    whole = Verdict([], 0, 0, 0, [])

    def is_over() -> bool:
        return time.monotonic() >= ends or (kills is not None and kills_in(happened) >= kills)

    for number in range(1_000_000):
        if number and is_over():
            break
        run = folder / f"run-{number}"

        def note(fault: Fault, role: str, pid: int, run: Path = run) -> None:
            happened.append(f"{fault.kind} {role}")
            say(f"fault {len(happened)}: {fault.kind} {role} (process {pid}) after step {steps_of(run)}")
            with (folder / "faults.jsonl").open("a") as file:
                drawn = dataclasses.asdict(fault)
                line = {"time": time.time(), "run": run.name, "kind": drawn.pop("kind"), "role": role, "pid": pid}
                line |= {"drawn": drawn}
                file.write(to_json(line) + "\n")

        def faults(number: int = number) -> Iterator[Fault]:
            for fault in schedule(seed + number):
                if is_over():
                    return
                yield fault

        mode = list(MODES)[(seed + number) % len(MODES)]
        say(f"training {number + 1}, {mode}: {run}")
        problems = training(run, seed + number, MODES[mode], faults(), note, ends + ROUND_S)
        for problem in problems:
            say(f"  wrong: {problem}")
        restarts = (folder / f"{run.name}.txt").read_text(errors="replace").count("] attempt ")
        whole = Verdict(
            happened,
            whole.restarts + restarts,
            whole.trainings + 1,
            whole.steps + steps_of(run),
            [*whole.problems, *(f"{run.name}: {problem}" for problem in problems)],
        )
    return whole


def training(
    run: Path,
    seed: int,
    mode: Sequence[str],
    faults: Iterator[Fault],
    note: Callable[[Fault, str, int], None],
    ends: float,
) -> list[str]:
    """One training in this mode under these faults, to its end; what is wrong afterwards."""
    shared = list(Path("/dev/shm").glob("*"))
    # Short, because Unix sockets lie in it; its own, so that whatever stays in it is this run's.
    temporary = Path(tempfile.mkdtemp(prefix="c-"))
    retriever = RetrieverServer(run.with_suffix(".retriever.txt"))
    command = [
        *(sys.executable, "-m", "agentrl.cli.main", "train", *FLAGS, "--seed", str(seed), "--output-dir", str(run)),
        *("--env-arg", f"retriever=http://127.0.0.1:{retriever.port}", *mode),
    ]
    try:
        with run.with_suffix(".txt").open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(temporary)},
            )  # fmt: skip
            injector = Injector(
                lambda: processes_of(os.getpid(), but=process.pid), lambda: last_step(run)[1], faults, note
            )
            try:
                while process.poll() is None and time.monotonic() < ends:
                    retriever.turn()
                    injector.turn()
                    time.sleep(POLL_S)
            finally:
                ended = process.poll()
                if ended is None:
                    process.send_signal(signal.SIGTERM)
                retriever.close()
                orphans = end_leftovers(LEAVING_S)
        problems = [] if ended == 0 else [f"it ended with exit code {ended}" if ended else "it did not come to its end"]
        problems += [f"process {proc.pid} outlived the run" for proc in orphans]
        deadline = time.monotonic() + LEAVING_S
        while (left := left_behind(temporary, shared)) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # others use shared memory too
        return [*problems, *left, *audit(run, least_success=LEAST_SUCCESS)]
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def last_step(run: Path) -> tuple[int, float]:
    """The newest step that a run logged, and when; zeros before the first."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        lines = [line for line in read_jsonl(run / "metrics.jsonl", damaged=[]) if "time/step" in line]
        return int(lines[-1]["step"]), float(lines[-1]["time"])
    return 0, 0.0


def steps_of(run: Path) -> int:
    """Steps that a run has done."""
    return last_step(run)[0]


def kills_in(faults: Sequence[str]) -> int:
    """How many of these faults are kills."""
    return sum(fault.startswith("kill ") for fault in faults)


def report(verdict: Verdict) -> str:
    """The closing words."""
    counted = Counter(verdict.faults)
    return "\n".join(
        [
            f"{len(verdict.faults)} faults, {kills_in(verdict.faults)} of them kills, in {verdict.trainings} trainings "
            f"of {verdict.steps} steps, {verdict.restarts} restarts:",
            *(f"  {times:>3} {what}" for what, times in sorted(counted.items())),
            *(f"wrong: {problem}" for problem in verdict.problems),
            "nothing was lost, trained twice or left over" if not verdict.problems else "the audit found faults",
        ]
    )
