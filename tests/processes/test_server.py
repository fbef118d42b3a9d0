"""Server processes: start, stop, ports, keys, and their end with their owner."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.engine import EngineProcess, EngineSpec
from agentrl.errors import EngineError
from agentrl.processes.server import ServerProcess
from agentrl.processes.tree import descendants, identify, is_running


class DummyServer(ServerProcess):
    """The server of ``dummy_server.py`` with the given options."""

    def __init__(self, tmp_path: Path, *, port: int = 0, **options: Any) -> None:
        super().__init__("dummy", "tests.processes.dummy_server", log_dir=tmp_path, port=port)
        self.options = options

    def arguments(self) -> list[str]:
        return [json.dumps({"port": self.port, **self.options})]


def wait_for(condition: Any, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_start_and_stop_leave_nothing_behind(tmp_path: Path) -> None:
    server = DummyServer(tmp_path, children=2)
    server.start(30)
    tree = server.tree()
    assert len(tree) == 3
    assert server.is_alive() and server.is_healthy()
    server.stop()
    assert not any(is_running(proc) for proc in tree)
    assert not server.scratch.exists()
    assert not server.is_alive()
    server.stop()


def test_a_server_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    server = DummyServer(tmp_path, stubborn=True, children=1)
    server.start(30)
    tree = server.tree()
    server.stop(timeout=0.3)
    assert not any(is_running(proc) for proc in tree)


def test_key_is_neither_in_arguments_nor_in_the_log(tmp_path: Path) -> None:
    server = DummyServer(tmp_path)
    server.start(30)
    try:
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert server.api_key.encode() not in arguments
        assert server.api_key not in server.log_path.read_text()
    finally:
        server.stop()


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is in use. Give another port"):
            DummyServer(tmp_path, port=port).start(30)


def test_a_free_port_that_is_taken_meanwhile_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.processes import server as process

    with socket.create_server(("127.0.0.1", 0)) as taken:
        free_port = process.free_port
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(process, "free_port", lambda host: next(ports, None) or free_port(host))
        server = DummyServer(tmp_path)
        server.start(30)
        try:
            assert server.port != taken.getsockname()[1]
            assert server.is_healthy()
        finally:
            server.stop()


def test_ends_while_starting(tmp_path: Path) -> None:
    server = DummyServer(tmp_path, exit=3, print="the reason")
    with pytest.raises(EngineError, match=r"dummy did not start: .*exit status 3[\s\S]*the reason"):
        server.start(30)
    assert not server.scratch.exists()


def test_not_healthy_in_time(tmp_path: Path) -> None:
    server = DummyServer(tmp_path, healthy=False)
    with pytest.raises(EngineError, match="not healthy in time"):
        server.start(2)
    assert not server.is_alive()


def test_wait_returns_when_the_server_ends(tmp_path: Path) -> None:
    server = DummyServer(tmp_path)
    server.start(30)
    # A process with a thousand connections: select(2) takes no descriptor above 1,023.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert not server.wait(0.05)
        threading.Timer(0.2, os.kill, (server.pid, signal.SIGKILL)).start()
        assert server.wait(3600)
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.stop()


def test_stopped_while_it_starts(tmp_path: Path) -> None:
    server = DummyServer(tmp_path, healthy=False)
    threading.Timer(0.5, server.stop).start()
    with pytest.raises(EngineError, match="stopped"):
        server.start(30)
    with pytest.raises(EngineError, match="stopped"):
        server.start(30)


OWNER = textwrap.dedent(
    """
    import sys, json, threading, time
    from pathlib import Path
    from tests.processes.test_server import DummyServer
    server = DummyServer(Path(sys.argv[1]))
    # From a thread that ends: the server must live on.
    thread = threading.Thread(target=server.start, args=(30,)); thread.start(); thread.join()
    time.sleep(0.3)
    print(server.pid, server.is_healthy(), flush=True)
    time.sleep(300)
    """
)


def test_dies_with_an_owner_that_is_killed_but_not_with_a_thread(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        pid, healthy = owner.stdout.readline().split()
        assert healthy == "True"
        server = identify(int(pid))
        assert server is not None
        owner.kill()
        wait_for(lambda: not is_running(server))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


# The engine's command line; the engine itself is in test_real_engine.py.


def test_missing_model(tmp_path: Path) -> None:
    engine = EngineProcess(EngineSpec(str(tmp_path / "nowhere")), log_dir=tmp_path)
    with pytest.raises(EngineError, match="no model at .*nowhere.*Give the folder of an HF checkpoint"):
        engine.start()
    assert engine.scratch is None


def test_too_little_memory(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = EngineSpec(str(tmp_path), max_total_tokens=10**12)
    assert spec.kv_bytes() == 10**12 * 2 * 2 * 2 * 16 * 4
    with pytest.raises(EngineError, match=r"too little memory: it needs about .* Give a smaller max_total_tokens"):
        EngineProcess(spec, log_dir=tmp_path).start()
    assert EngineSpec(str(tmp_path), dtype="bfloat16", max_total_tokens=100).kv_bytes() == 100 * 2 * 2 * 2 * 16 * 2
    assert EngineSpec(str(tmp_path), extra={"max_total_tokens": 7}).cpu_tokens == 7


def flags(spec: EngineSpec) -> dict[str, str]:
    words = spec.server_arguments()
    values = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            values[word[2:]] = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else ""
    return values


def test_arguments_on_the_cpu() -> None:
    values = flags(EngineSpec("m"))
    assert values["device"] == "cpu"
    assert values["dtype"] == "float32"
    assert values["attention-backend"] == "torch_native"
    assert values["sleep-on-idle"] == ""
    assert values["max-total-tokens"] == "65536"


def test_arguments_on_cuda_leave_sglang_its_own_choices() -> None:
    values = flags(EngineSpec("m", device="cuda", tp=4, mem_fraction=0.7))
    assert values["dtype"] == "bfloat16"
    assert values["tp-size"] == "4"
    assert values["mem-fraction-static"] == "0.7"
    assert not {"attention-backend", "sleep-on-idle", "max-total-tokens", "grammar-backend"} & set(values)


def test_a_deterministic_engine_on_the_cpu_has_one_thread_and_float32() -> None:
    assert flags(EngineSpec("m", deterministic=True))["enable-deterministic-inference"] == ""
    assert "enable-deterministic-inference" not in flags(EngineSpec("m"))
    assert flags(EngineSpec("m", device="cuda", threads=4, deterministic=True))["dtype"] == "bfloat16"
    for wrong in ({"threads": 2}, {"dtype": "bfloat16"}):
        with pytest.raises(EngineError, match="float32 with one thread"):
            EngineSpec("m", deterministic=True, **wrong)


def test_extra_arguments_win() -> None:
    extra = {
        "max_total_tokens": 128,
        "sleep-on-idle": False,
        "grammar_backend": None,
        "lora-paths": ["a", "b"],
        "enable_metrics": True,
        "json_model_override_args": {"rope": 1},
    }
    words = EngineSpec("m", extra=extra).server_arguments()
    joined = " ".join(words)
    assert "--max-total-tokens 128" in joined
    assert "sleep-on-idle" not in joined and "grammar-backend" not in joined
    assert "--lora-paths a b" in joined
    assert "--enable-metrics" in words
    assert words[words.index("--json-model-override-args") + 1] == '{"rope": 1}'


def test_wrong_device() -> None:
    with pytest.raises(EngineError, match="'tpu'; expected 'cpu' or 'cuda'"):
        EngineSpec("m", device="tpu")


def test_descendants_are_found_in_other_sessions() -> None:
    shell = subprocess.Popen(["sh", "-c", "setsid sleep 300 & sleep 300"])
    try:
        wait_for(lambda: len(descendants(shell.pid)) == 3)
        tree = descendants(shell.pid)
        assert tree[0].pid == shell.pid
    finally:
        for proc in descendants(shell.pid):
            os.kill(proc.pid, signal.SIGKILL)
        shell.wait()
