"""Runs of the real stack through the command line, watched from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sockets import command_line

from agentrl.processes.tree import Process, descendants, is_running


class Command:
    """One process of ``agentrl`` or of a script that uses it, and every process it ever had."""

    def __init__(self, words: list[str], folder: Path):
        self.log = folder / "output.txt"
        # Short, because Ray's sockets lie in it; its own, so that whatever stays in it is this run's.
        self.temp = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
        self._output = self.log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(self.temp)},
        )
        self.seen: set[Process] = set()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.seen.update(descendants(self.process.pid, include_root=False))
            time.sleep(0.25)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 240.0) -> int:
        code = self.process.wait(seconds)
        self._watcher.join(5)
        return code

    def wait_until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        """Poll until ``condition``; fail when the process ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.text[-3000:]}"
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def left_behind(self, seconds: float = 20.0) -> list[str]:
        """Processes still running, and temporary folders still there, after at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            left = [f"{p.pid} {command_line(p.pid)}" for p in self.seen if is_running(p)]
            left += [str(path) for path in self.temp.glob("*")]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._output.close()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start ``agentrl`` with arguments, or a Python script, in the test's folder."""
    commands: list[Command] = []

    def begin(*arguments: str, script: Path | None = None) -> Command:
        program = [str(script)] if script else ["-m", "agentrl.cli.main"]
        commands.append(Command([*program, *arguments], tmp_path))
        return commands[-1]

    yield begin
    for command in commands:
        command.end()
