"""A run on two machines, one of which is cut off and comes back."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import PORT, RAY, two_machines, until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1500)]

SMALL = (
    *("--env", "search", "--eval-interval", "0", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
    *("--rollout-concurrency", "16", "--threads", "1"),
    *("--rollout-health-check-interval", "5", "--rollout-health-check-timeout", "15"),
)
PATIENCE_S = 400.0


class Cluster:
    """Two machines and a run on them; the driver is on the first."""

    def __init__(self, folder: Path):
        self.head, self.other = two_machines(folder)
        self.run, self.log = folder / "run", folder / "output.txt"

    def start(self, *cpus: int) -> None:
        for machine, number in zip((self.head, self.other), cpus, strict=True):
            machine.start_ray(self.head.address, number)

    def train(self, *flags: str) -> None:
        words = (sys.executable, "-m", "agentrl.cli.main", "train", *SMALL, "--output-dir", str(self.run), *flags)
        address = f"{self.head.address}:{PORT}"
        # Ray's head may still be starting.
        ready = 'for i in {1..60}; do "$0" status >/dev/null 2>&1 && break; sleep 1; done; exec "$@"'
        self.driver = self.head.start("bash", "-c", ready, str(RAY), *words, log=self.log, RAY_ADDRESS=address)

    def cut(self, *, off: bool) -> None:
        for machine in (self.head, self.other):
            machine.cut_off() if off else machine.heal()

    def logged(self, name: str) -> str:
        file = self.run / "logs" / name
        return file.read_text(errors="replace") if file.exists() else ""

    def steps(self) -> list[int]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        until(condition, seconds, self.driver, self.log)

    def end(self) -> None:
        for machine in (self.head, self.other):
            machine.remove()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Short, because Ray's sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="n-", dir="/tmp"))
    try:
        try:
            made = Cluster(folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        try:
            yield made
        finally:
            made.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_run_goes_on_without_a_machine_of_engines_and_takes_it_back(cluster: Cluster) -> None:
    # Two ranks, the manager and one engine fill the first.
    cluster.start(4, 1)
    cluster.train("--num-rollout", "10000", "--actor-num-gpus-per-node", "2", "--rollout-num-engines", "2")
    cluster.until(lambda: len(cluster.steps()) >= 1)
    manager = "rollout-manager.log"
    (name,) = re.findall(rf"(engine-\d) runs at http://{re.escape(cluster.other.address)}:", cluster.logged(manager))
    assert f"http://{cluster.head.address}:" in cluster.logged(manager), "the other engine, at its own address"

    cluster.cut(off=True)
    cluster.until(lambda: f"{name} is replaced" in cluster.logged(manager), 150)
    before = len(cluster.steps())
    cluster.until(lambda: len(cluster.steps()) >= before + 2)

    cluster.cut(off=False)
    cluster.until(lambda: re.search(rf"{name}-restart-\d+ takes requests", cluster.logged(manager)) is not None)
    before = len(cluster.steps())
    cluster.until(lambda: len(cluster.steps()) >= before + 1)
    steps = cluster.steps()
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    cluster.driver.send_signal(signal.SIGTERM)
    assert cluster.driver.wait(90) in (143, -signal.SIGTERM)


def test_the_run_waits_for_a_machine_of_ranks_and_goes_on(cluster: Cluster) -> None:
    cluster.start(4, 2)
    cluster.train(
        *("--num-rollout", "4", "--actor-num-nodes", "2", "--save-interval", "1", "--auto-resume"),
        *("--rollout-num-engines", "1"),
    )
    cluster.until(lambda: (cluster.run / "checkpoints").is_dir() and len(cluster.steps()) >= 2)
    cluster.cut(off=True)
    cluster.until(lambda: "attempt 2" in cluster.log.read_text(), 240)
    said = cluster.log.read_text()
    assert re.search(r"trainer rank \d .*(died|no sign of life)", said), said[-2000:]
    cluster.cut(off=False)
    cluster.driver.wait(PATIENCE_S)
    assert cluster.driver.returncode == 0, cluster.log.read_text()[-3000:]
    steps = cluster.steps()
    assert steps == list(range(steps[0], steps[0] + 4))
    assert re.search(r"machines \('10\.99\.0\.\d', '10\.99\.0\.\d'\)", cluster.logged("driver.log"))
