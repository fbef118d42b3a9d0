"""An engine whose children are spawned, as on every CUDA machine. On its own: a warden that closes ends all else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from sockets import listening

from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.processes.warden import Warden
from tests.engines.test_real_engine import generate

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def shared_files(pids: list[int]) -> set[Path]:
    """Files in shared memory that these processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if " /dev/shm/" in line}
    return {Path(path.removesuffix(" (deleted)")) for path in paths}


async def test_spawned_children_are_closed_too_and_leave_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """On every CUDA machine SGLang spawns its children, and what we change in it has to hold in them."""
    with Warden():
        engine = EngineProcess(EngineSpec(str(tiny_model), max_total_tokens=8192), log_dir=tmp_path)
        engine.module = "tests.engines.spawned_server"
        try:
            engine.start(240)
            tree = [proc.pid for proc in engine.tree()]
            spawned = [pid for pid in tree if b"sglang::" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            assert len(spawned) == 2 and len(tree) > 3  # spawning brings a process that tracks resources
            assert {host for host, _ in listening(tree)} == {"127.0.0.1"}
            files = shared_files(tree)
            assert len(await generate(engine.url, engine.api_key)) > 0
            # A detokenizer that dies is noticed without waiting for two health checks.
            assert not engine.wait(0.01)
            os.kill(spawned[-1], signal.SIGKILL)
            assert engine.wait(60)
        finally:
            engine.stop()
    assert not [path for path in files if path.exists()]
