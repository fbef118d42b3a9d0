"""An engine in a Ray actor: it serves, tells why it cannot start, and dies with its actor."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(300)]

SCRIPT = textwrap.dedent(
    """
    import asyncio, os, signal, sys, time
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[3],
             _node_ip_address="127.0.0.1", object_store_memory=100 << 20)
    from agentrl.errors import EngineError
    from agentrl.engines.engine import EngineSpec
    from agentrl.engines.actor import RayEngine, SERVING
    from agentrl.engines.pool import EnginePool
    from agentrl.processes.tree import identify, is_running

    async def main():
        spec = EngineSpec(sys.argv[1], max_total_tokens=4096)
        options = {"num_cpus": 1}
        nowhere = EngineSpec("nowhere")
        missing = RayEngine(options, nowhere, name="x", log_dir=sys.argv[2], host="127.0.0.1", api_key="k")
        try:
            await missing.call("start", 60.0)
        except EngineError as error:
            assert "no model at 'nowhere'" in str(error), error
        await missing.end()
        pool = EnginePool(spec, 1, log_dir=sys.argv[2], ray_options=[options], health_interval=0)
        try:
            await pool.start()
            place = pool._places[0]
            tree = [identify(pid) for pid in await place.engine.call("pids")]
            assert len(tree) == 3
            actor = int(open(f"/proc/{tree[0].pid}/stat").read().rpartition(")")[2].split()[1])
            os.kill(actor, signal.SIGKILL)
            deadline = time.monotonic() + 120
            while place.incarnation == 0 or place.state != SERVING:
                assert time.monotonic() < deadline, (place, pool.broken)
                await asyncio.sleep(0.2)
            assert not any(is_running(proc) for proc in tree)
            tree = [identify(pid) for pid in await place.engine.call("pids")]
        finally:
            await pool.stop()
        assert not any(is_running(proc) for proc in tree)

    asyncio.run(main())
    ray.shutdown()
    print("well")
    """
)


def test_an_engine_dies_with_its_ray_actor_and_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    ray_dir = Path(f"/tmp/agentrl-test-{os.getpid()}")  # short: Ray puts Unix sockets below it
    command = [sys.executable, "-c", SCRIPT, str(tiny_model), str(tmp_path), str(ray_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    finally:
        subprocess.run(["rm", "-rf", str(ray_dir)], check=True)
    assert done.stdout.strip().endswith("well"), done.stdout[-2000:] + done.stderr[-4000:]
