"""Where Ray puts the actors of a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from agentrl.config import load_config
from agentrl.errors import AgentRLError, ConfigError
from agentrl.orchestrator.cluster import Bundle, Cluster, placement
from agentrl.orchestrator.launch import bundles, train
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
    groups, places = placement(bundles(cfg))
    assert groups == [[{"CPU": 2.0}, {"CPU": 2.0}], [{"CPU": 1.0}] * 4]
    assert places == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_two_machines_are_refused_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = load_config(["--env", "search", "--actor-num-nodes", "2", "--output-dir", str(tmp_path / "run")])
    with pytest.raises(ConfigError, match="--actor-num-nodes 2 asks for 2 machines.*RAY_ADDRESS"):
        train(cfg)
    assert not (tmp_path / "run").exists()


def test_a_cluster_of_too_few_machines_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True}, {"Alive": False}])
    cluster = Cluster([Bundle("rank-0", node=0), Bundle("rank-1", node=1)], namespace="x", temp_dir="/nowhere")
    with pytest.raises(AgentRLError, match="asks for 2 machines; the Ray cluster at head:6379 has 1"):
        cluster._reserve(ray)


def test_a_signal_in_the_middle_of_rays_import_comes_through(monkeypatch):
    cluster = Cluster([Bundle("rank-0")], namespace="x", temp_dir="/nowhere")
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it again would fail
    monkeypatch.setattr(cluster, "start", lambda: signal.raise_signal(signal.SIGTERM))
    with raise_on_signals(), pytest.raises(Terminated), cluster:
        pass


SCRIPT = """
import json, os, sys
from ray.cluster_utils import Cluster as Nodes
nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 4})
nodes.add_node(num_cpus=4)
os.environ["RAY_ADDRESS"] = nodes.address
from agentrl.processes.signals import Terminated, raise_on_signals
from agentrl.orchestrator.cluster import Bundle, Cluster
import ray

class Rank:
    def node(self):
        return ray.get_runtime_context().get_node_id()

ranks = [Bundle(f"rank-{i}", node=i // 2) for i in range(4)]
with Cluster([*ranks, Bundle("manager")], namespace="x", temp_dir=sys.argv[1]) as cluster:
    actors = [ray.remote(Rank).options(**cluster.options(i)).remote() for i in range(5)]
    print(json.dumps(ray.get([actor.node.remote() for actor in actors], timeout=120)))
nodes.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_land_on_two_machines(tmp_path):
    """Two of Ray's nodes on this machine stand for two machines."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    where = json.loads(done.stdout.splitlines()[-1])
    assert where[0] == where[1] != where[2] == where[3]


def test_a_run_asks_for_ranks_engines_and_a_manager():
    assert len(bundles(load_config(["--env", "search"]))) == 3
