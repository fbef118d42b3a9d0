"""Two machines on this one: network namespaces, each with an address, a Ray and a shared memory of its own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RAY = Path(sys.executable).with_name("ray")
PORT = 6379
"""Of Ray's head. Nobody else is in its network."""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


class Machine:
    """One of them. All of its processes are known by its namespace."""

    def __init__(self, name: str, address: str, folder: Path, environment: dict[str, str]):
        self.name, self.address = name, address
        self._log, self._environment, self._folder = folder / f"{name}.log", environment, folder
        ip("netns", "add", name)

    def start(self, *words: str, log: Path | None = None, **more: str) -> subprocess.Popen[bytes]:
        """A process here."""
        with (log or self._log).open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *words],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=self._folder,
                env=os.environ | self._environment | more, start_new_session=True,
            )  # fmt: skip

    def start_ray(self, head: str, cpus: int) -> subprocess.Popen[bytes]:
        """A Ray with its own ``/dev/shm``; the head where ``head`` is its address. Another that ends, cut off
        or because the head is not there yet, is started again."""
        role = ["--head", "--port", str(PORT)] if head == self.address else ["--address", f"{head}:{PORT}"]
        extra = ["--include-dashboard", "false", "--temp-dir", str(self._folder)] if head == self.address else []
        ray = [str(RAY), "start", *role, *extra, "--node-ip-address", self.address, "--num-cpus", str(cpus)]
        ray += ["--object-store-memory", str(100 << 20), "--disable-usage-stats", "--block"]
        again = 'exec "$@"' if head == self.address else 'while true; do "$@"; sleep 1; done'
        mount = f"mount -t tmpfs -o size=1g tmpfs /dev/shm && {again}"
        return self.start("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "_", *ray)

    def processes(self) -> list[int]:
        """Ids of all that runs here."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def cut_off(self) -> None:
        """Nothing leaves it any more: a token bucket that is smaller than any packet drops all, and says nothing."""
        self._tc("add", "root", "tbf", "rate", "1kbit", "burst", "10", "latency", "1ms")

    def heal(self) -> None:
        self._tc("del", "root")

    def _tc(self, what: str, *words: str) -> None:
        done = ["tc", "-n", self.name, "qdisc", what, "dev", "eth0", *words]
        subprocess.run(done, check=True, capture_output=True, timeout=20)

    def remove(self) -> None:
        """End all that runs here, and the machine."""
        for _ in range(50):
            pids = self.processes()
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not pids:
                break
            time.sleep(0.2)
        ip("netns", "del", self.name)


def two_machines(folder: Path) -> tuple[Machine, Machine]:
    """Connected. Raises CalledProcessError where this is not allowed."""
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RES_OPTIONS": "timeout:1 attempts:1",  # no server of names is there
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    made: list[Machine] = []
    try:
        for letter, address in (("a", "10.99.0.1"), ("b", "10.99.0.2")):
            made.append(Machine(f"agentrl-{os.getpid()}-{letter}", address, folder, environment))
        first, second = made
        ip("-n", first.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.name)
        for machine, other in ((first, second), (second, first)):
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", machine.name, "link", "set", link, "up")
            ip("-n", machine.name, "route", "add", "default", "via", other.address)
    except BaseException:
        for machine in made:
            machine.remove()
        raise
    return first, second


def until(condition: Callable[[], bool], seconds: float, running: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a condition while a command runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.poll() is None, f"ended with {running.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"not within {seconds:g} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)
