"""Where Ray puts the actors of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from agentrl.config import load_config
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, ConfigError, LostError
from agentrl.orchestrator import cluster as module
from agentrl.orchestrator.cluster import Bundle, Cluster, bundles_of, on_gpus, placement
from agentrl.orchestrator.launch import train
from agentrl.processes.signals import Terminated, raise_on_signals


def test_ranks_of_one_machine_are_never_split():
    ranks = [Bundle(f"rank-{i}", 1, 1, node=0) for i in range(2)]
    asked = [*ranks, Bundle("engine-0", 1, 2), Bundle("manager")]
    groups, places = placement(asked)
    assert groups == [[{"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 2}, {"CPU": 1.0}]]
    assert places == [(0, 0), (0, 0), (0, 1), (0, 2)]


def test_machines_of_ranks_are_apart_and_the_rest_is_wherever_there_is_room():
    cfg = load_config(
        ["--env", "search", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", "--rollout-num-engines", "3"]
    )
    groups, places = placement(bundles_of(cfg, World()))
    assert groups == [[{"CPU": 2.0}, {"CPU": 2.0}], [{"CPU": 1.0}] * 4]
    assert places == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_the_manager_is_beside_the_driver_where_that_machine_takes_actors():
    """Then a run ends with that machine, or with one that holds ranks, and with no other."""
    bundles = bundles_of(wanted("--rollout-num-workers", "2"), World())
    ((*_, engine, manager, first, second),), _ = placement(bundles, "10.0.0.1")
    assert manager == {"CPU": 1.0, "node:10.0.0.1": 0.001}
    assert engine == first == second == {"CPU": 1.0}


def wanted(*flags: str):
    return load_config(["--env", "search", *flags])


def test_one_gpu_is_shared_by_the_rank_and_the_engine():
    world = World(gpus=1)
    assert world.is_shared(wanted())
    assert [(b.num_cpus, b.num_gpus, b.node) for b in bundles_of(wanted(), world)] == [
        *((1, 1, 0), (1, 0, 0), (1, 0, None))
    ]
    assert world.engine_memory(wanted()) == 0.4, "beside a trainer that stays"
    two = World(gpus=2)
    assert not two.is_shared(wanted())
    assert [b.num_gpus for b in bundles_of(wanted(), two)] == [1, 1, 0]
    assert [b.num_gpus for b in bundles_of(wanted(), World())] == [0, 0, 0]


def test_colocated_engines_are_on_the_machines_and_gpus_of_the_ranks():
    flags = ("--colocate", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4")
    cfg, world = wanted(*flags, "--rollout-num-gpus-per-engine", "2"), World(gpus=8)
    assert (cfg.rollout_num_engines, cfg.rollout_num_gpus) == (4, 8)
    bundles = bundles_of(cfg, world)
    assert [(b.num_gpus, b.node) for b in bundles[8:12]] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    groups, _ = placement(bundles)
    assert groups == [[{"CPU": 6, "GPU": 4}] * 2, [{"CPU": 1.0}]], "Ray counts the ranks' GPUs alone"
    placed = on_gpus(list("01230123"), [{"num_gpus": 0}] * 4, 2)
    assert [o["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for o in placed] == ["0,1", "2,3", "0,1", "2,3"]
    assert world.engine_memory(cfg) == 0.8, "beside a trainer that is away"
    assert world.engine_memory(wanted(*flags, "--no-offload-train")) == 0.4
    apart = World(gpus=8, addresses=("10.0.0.1", "10.0.0.2"))
    with pytest.raises(ConfigError, match="Give --weight-sync-transport ipc, or disk where there are several machines"):
        bundles_of(cfg, apart)
    assert bundles_of(wanted(*flags, "--weight-snapshot-dir", "/shared"), apart)
    assert [b.num_gpus for b in bundles_of(cfg, World())][8:12] == [0] * 4


def test_weights_go_through_shared_memory_where_all_is_on_one_machine_without_gpus():
    several = World(addresses=("10.0.0.7", "10.0.0.8"))
    worlds = [World(), several, World(gpus=2), World(gpus=1)]
    assert [w.weight_sync_transport(wanted()) for w in worlds] == ["ipc", "broadcast", "broadcast", "ipc"]
    asked = [wanted("--weight-sync-transport", way) for way in ("broadcast", "ipc", "disk")]
    assert [World().weight_sync_transport(cfg) for cfg in asked] == ["broadcast", "ipc", "disk"]
    with pytest.raises(ConfigError, match="ipc: engines map memory of the trainer's machine, and this run is on 2"):
        bundles_of(asked[1], several)
    for cfg, world in ((asked[0], World(gpus=1)), (wanted("--colocate"), World(8, several.addresses))):
        with pytest.raises(ConfigError, match="NCCL has no group of two .* ipc, or disk where there are several machi"):
            bundles_of(cfg, world)
    everywhere = wanted("--colocate", "--weight-snapshot-dir", "/everywhere")
    assert World(8, several.addresses).weight_sync_transport(everywhere) == "disk"


@pytest.mark.parametrize("flags", [("--actor-num-gpus-per-node", "2"), ("--rollout-num-engines", "2")])
def test_gpus_that_are_not_there_are_named(flags):
    with pytest.raises(ConfigError, match="asks for 3 GPUs .* there are 1. .* a single GPU is shared by one rank"):
        bundles_of(wanted(*flags), World(gpus=1))


def test_the_world_is_that_of_ray_or_of_this_machine(monkeypatch):
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0}, "NodeManagerAddress": "10.0.0.1"},
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}, "NodeManagerAddress": "10.0.0.2"},
        {"Alive": False, "Resources": {"GPU": 4.0}, "NodeManagerAddress": "10.0.0.3"},
    ]
    world = World.of(nodes)  # the driver's own machine has none
    assert (world.gpus, world.addresses, world.device, world.backend) == (4, ("10.0.0.1", "10.0.0.2"), "cuda", "nccl")
    assert not world.is_one_machine and World().is_one_machine
    assert World.of([nodes[0], nodes[0]]).is_one_machine, "two of Ray's nodes on one machine"
    monkeypatch.setattr("os.listdir", lambda path: ["nvidia3", "nvidiactl", "null"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert World.here().gpus == 1, "whatever its number is"
    for visible, gpus in (("", 0), ("-1", 0), ("0,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert World.here().gpus == gpus
    assert (World().device, World().backend) == ("cpu", "gloo")


def test_two_machines_are_refused_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = load_config(["--env", "search", "--actor-num-nodes", "2", "--output-dir", str(tmp_path / "run")])
    with pytest.raises(ConfigError, match="--actor-num-nodes 2 asks for 2 machines.*RAY_ADDRESS"):
        train(cfg)
    assert not (tmp_path / "run").exists()


def test_a_machine_that_starts_is_waited_for_and_one_that_does_not_is_lost(monkeypatch):
    """Another start may find it."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    cluster = Cluster(lambda world: [], nodes=2, namespace="x", temp_dir="/nowhere")
    there = [{"Alive": True}, {"Alive": False}]
    with pytest.raises(LostError, match="asks for 2 machines; the Ray cluster at head:6379 has 1"):
        cluster._await_nodes(SimpleNamespace(nodes=lambda: there), time.monotonic() - 1)
    waits: list[float] = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: (waits.append(seconds), there.append({"Alive": True})))
    cluster._await_nodes(SimpleNamespace(nodes=lambda: there), time.monotonic() + 60)
    assert waits == [1.0]


def test_a_signal_in_the_middle_of_rays_import_comes_through(monkeypatch):
    cluster = Cluster(lambda world: [Bundle("rank-0")], namespace="x", temp_dir="/nowhere")
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it again would fail
    monkeypatch.setattr(cluster, "start", lambda: signal.raise_signal(signal.SIGTERM))
    with raise_on_signals(), pytest.raises(Terminated), cluster:
        pass


def fake_ray(monkeypatch: pytest.MonkeyPatch, init: Callable[..., None], shutdown: Callable[[], None]) -> None:
    private = SimpleNamespace(utils=SimpleNamespace(), worker=SimpleNamespace())
    ray = SimpleNamespace(init=init, _private=private, is_initialized=lambda: True, shutdown=shutdown)
    monkeypatch.setattr(module, "_leave_out", lambda *args: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"})


def test_a_ray_that_does_not_start_in_time_is_one_sentence(monkeypatch):
    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.")

    fake_ray(monkeypatch, init, lambda: None)
    with pytest.raises(AgentRLError, match=r"did not start .*: The current node timed out.*busy \(load \d+"):
        Cluster(lambda world: [Bundle("rank-0")], namespace="x", temp_dir="/nowhere").start()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("during", ["init", "shutdown"])
def test_a_signal_during_rays_start_or_end_waits_for_it(monkeypatch, signum, during):
    """Half a start cannot be shut down, and the process would crash at its end."""
    said: list[str] = []

    def call(name: str) -> None:
        if name == during:
            signal.raise_signal(signum)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's C++ does
        said.append(name)

    cluster = Cluster(lambda world: [], namespace="x", temp_dir="/nowhere")
    monkeypatch.setattr(Cluster, "_reserve", lambda *args: None)
    fake_ray(monkeypatch, lambda **options: call("init"), lambda: call("shutdown"))
    with raise_on_signals(), pytest.raises(Terminated if signum == signal.SIGTERM else KeyboardInterrupt), cluster:
        said.append("in use")
    assert said == (["init", "shutdown"] if during == "init" else ["init", "in use", "shutdown"])


SCRIPT = """
import json, os, sys
from ray.cluster_utils import Cluster as Nodes
nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 6, "num_gpus": 2})
nodes.add_node(num_cpus=6, num_gpus=2)
os.environ["RAY_ADDRESS"] = nodes.address
from agentrl.processes.signals import Terminated, raise_on_signals
from agentrl.orchestrator import cluster as module
from agentrl.orchestrator.cluster import Bundle, Cluster, bundles_of, on_gpus
from agentrl.config import load_config
from agentrl.errors import ConfigError
from pathlib import Path
import ray

class Actor:
    def place(self):
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

flags = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", "--weight-snapshot-dir", sys.argv[1]]
cfg = load_config(["--env", "search", "--colocate", *flags])
with Cluster(lambda world: bundles_of(cfg, world), namespace="x", temp_dir=sys.argv[1]) as cluster:
    assert len(cluster.world.addresses) == 2 and cluster.world.gpus == 4
    options = [cluster.options(i) for i in range(9)]
    ranks = [ray.remote(Actor).options(**option).remote() for option in options[:4]]
    places = ray.get([rank.place.remote() for rank in ranks], timeout=120)
    engines = on_gpus([gpu for _, gpu in places], options[4:8], 1)
    others = [ray.remote(Actor).options(**option).remote() for option in [*engines, options[8]]]
    print(json.dumps([*places, *ray.get([actor.place.remote() for actor in others], timeout=120)]))
    cluster.check_sees(Path(sys.argv[1]))
    try:
        cluster.check_sees(Path(sys.argv[1], "nowhere"))
    except ConfigError as error:
        print(error)
nodes.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_land_on_two_machines_and_colocated_engines_on_their_gpus(tmp_path):
    """Two of Ray's nodes on this machine stand for two machines, with GPUs that are not there."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *_, places, refusal = done.stdout.splitlines()
    *ranks, first, second, third, fourth, manager = json.loads(places)
    assert ranks == [first, second, third, fourth], "each beside its rank, on the same GPU"
    (one, _), (also, _), (two, _), (too, _) = ranks
    assert one == also != two == too and {gpu for _, gpu in ranks} == {"0", "1"} and manager[1] == ""
    assert "does not see" in refusal and "nowhere" in refusal


def test_a_run_asks_for_ranks_engines_and_a_manager():
    assert len(bundles_of(wanted(), World())) == 3
