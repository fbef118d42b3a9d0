"""Where a run's processes live: Ray, started closed, with placement groups for everything.

With ``RAY_ADDRESS`` set (a cluster started by hand) the run joins it. Otherwise it starts a Ray of its
own that listens on the loopback interface only, asks for a token made for this run, keeps its
session in the temporary folder of the run, and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.engines.world import World
from agentrl.errors import ConfigError, LostError
from agentrl.processes.signals import hold_signals
from agentrl.processes.tree import descendants

if TYPE_CHECKING:
    from agentrl.config.schema import Config

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Longest wait for Ray to have room, and for the machines of a cluster."""
OBJECT_STORE_BYTES = 512 << 20
"""Shared memory in which batches travel."""
EPISODES_A_WORKER, CORES_A_WORKER = 256, 4
"""What a rollout worker is started for, where nobody said how many there are."""

# Ray picks the interface it binds from the address of the node. On Linux it resolves "127.0.0.1" to an
# outward address unless clusters are off, and then even its token-protected ports face the network.
_LOCAL_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Three Prometheus endpoints that know no token: collected by nobody in a local run, so not opened.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}


# What a Ray of one run starts for others to look at it: the autoscaler of a cluster that does not grow, a dashboard
# that nobody opens (it starts even when told not to), the forwarder of logs that no driver wants. Each is a Python
# process; together they take a quarter of the CPU time that Ray takes to start, and the start waits for one of them.
_ONLOOKERS = ("start_monitor", "start_log_monitor", "start_api_server")

_RAY_PROCESSES = {"gcs_server": "Ray's head, the GCS", "raylet": "Ray's daemon, the raylet"}


@dataclass(frozen=True)
class Bundle:
    """What one actor asks of a node: CPUs and GPUs."""

    name: str
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    node: int | None = None
    """Actors of one number share a node; those of different numbers never do. None: wherever there is room."""
    beside_driver: bool = False
    """On the driver's machine, if that takes actors: the run ends with that machine anyway, and with no other."""


def check_nodes(nodes: int) -> None:
    """Raises ConfigError when a Ray of our own, which has one node, would be asked for more."""
    if nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"--actor-num-nodes {nodes} asks for {nodes} machines, and without RAY_ADDRESS a run starts a Ray of its "
            "own on this one. Start Ray on each machine and set RAY_ADDRESS, or give --actor-num-gpus-per-node the "
            "number of all ranks."
        )


def bundles_of(cfg: Config, world: World) -> list[Bundle]:
    """What a run asks of Ray: ranks, engines, the manager, rollout workers, in this order; ranks alone where nothing is
    played, none where nothing is trained.
    Raises ConfigError: there are GPUs, but not enough; the weights cannot go the way that was asked for."""
    engines, per_engine = cfg.rollout_num_engines or 1, world.engine_ranks(cfg) if world.has_gpu else 0
    if not cfg.plays:
        engines = 0
    world_size = cfg.world_size if cfg.trains else 0
    shared = world.is_shared(cfg)
    needed = world_size + (0 if shared else engines * per_engine)
    if world.has_gpu and needed > world.gpus:
        of_engines = "engines beside it" if shared else f"{engines} x {per_engine} for engines"
        raise ConfigError(
            f"this run asks for {needed} GPUs ({world_size} for the trainer, {of_engines}), and there are "
            f"{world.gpus}. Ask for fewer ranks or engines, or have them share GPUs by --colocate; a single GPU is "
            "shared by one rank and one engine."
        )
    world.weight_sync_transport(cfg)
    per_node = cfg.world_size // cfg.actor_num_nodes
    ranks = [Bundle(f"rank-{i}", 1, 1 if world.has_gpu else 0, node=i // per_node) for i in range(world_size)]
    # To Ray shared GPUs are the ranks': with fractions it would put two ranks on one.
    places = [Bundle(f"engine-{i}", 1, per_engine) for i in range(engines)]
    if shared:
        each = cfg.rollout_num_gpus_per_engine
        places = [Bundle(f"engine-{i}", 1, node=i * each // per_node) for i in range(engines)]
    players = [Bundle(f"rollout-worker-{i}", 1) for i in range(rollout_workers(cfg))]
    if not cfg.plays:
        return ranks
    return [*ranks, *places, Bundle("rollout-manager", 1, beside_driver=True), *players]


def on_gpus(gpus: Sequence[str], engines: Sequence[Mapping[str, Any]], each: int) -> list[dict[str, Any]]:
    """Ray options of ``engines`` on the GPUs of the trainer's ranks, in order, ``each`` of so many.

    Args:
        gpus: of each rank, as CUDA_VISIBLE_DEVICES has it on its machine.
    """
    placed = []
    for number, options in enumerate(engines):
        seen = ",".join(gpus[number * each : (number + 1) * each])
        # The second: Ray has given the actor none, and would hide all of them.
        env = {"CUDA_VISIBLE_DEVICES": seen, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        placed.append({**options, "runtime_env": {"env_vars": env}})
    return placed


def rollout_workers(cfg: Config) -> int:
    """How many processes play episodes beside the manager's, see --rollout-num-workers; 0: the manager's alone."""
    if cfg.rollout_num_workers is not None:
        return cfg.rollout_num_workers
    number = min(cfg.rollout_concurrency // EPISODES_A_WORKER, (os.cpu_count() or 1) // CORES_A_WORKER)
    return number if number > 1 else 0


def placement(
    bundles: Sequence[Bundle], driver: str | None = None
) -> tuple[list[list[dict[str, float]]], list[tuple[int, int]]]:
    """Placement groups for the actors, and for each actor its group and its bundle there.

    Actors of one node are one bundle of Ray's, which is never split. The first group holds those bundles; where they
    are several, its strategy keeps them apart. The second holds all others. ``driver`` is the address of the driver's
    machine, where that takes actors.
    """
    nodes = sorted({b.node for b in bundles if b.node is not None})
    together = [_sum(b for b in bundles if b.node == node) for node in nodes]
    alone = [b for b in bundles if b.node is None]
    here = {f"node:{driver}": 0.001} if driver else {}
    groups = [together, [_sum([b]) | (here if b.beside_driver else {}) for b in alone]]
    places = [(0, nodes.index(b.node)) if b.node is not None else (1, alone.index(b)) for b in bundles]
    if len(nodes) <= 1:  # nothing to keep apart: one group, which Ray can pack as a whole
        places = [(0, i + len(nodes) * group) for group, i in places]
        groups = [together + groups[1]]
    return groups, places


def _sum(bundles: Iterable[Bundle]) -> dict[str, float]:
    bundles = list(bundles)
    gpus = sum(b.num_gpus for b in bundles)
    return {"CPU": sum(b.num_cpus for b in bundles)} | ({"GPU": gpus} if gpus else {})


class Cluster:
    """A started Ray with room reserved for each actor of the run.

    Use as a context manager: leaving it gives the room back and ends a Ray of our own.

    Args:
        plan: what each actor asks for, in the world that there is.
        nodes: machines that there must be; a cluster is waited for.
        namespace: Ray's namespace of the run.
        temp_dir: folder for Ray's session. Its path must be short: Unix sockets live below it, and their
            paths have at most 107 characters.
    """

    def __init__(
        self,
        plan: Callable[[World], Sequence[Bundle]],
        *,
        nodes: int = 1,
        namespace: str,
        temp_dir: str,
    ):
        self._nodes = nodes
        self.world = World.here()
        self.bundles: list[Bundle] = []
        self._plan = plan
        self.namespace = namespace
        self.temp_dir = temp_dir
        self._ray: Any = None
        self._groups: list[Any] = []
        self._places: list[tuple[int, int]] = []

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def is_local(self) -> bool:
        return not os.environ.get("RAY_ADDRESS")

    def start(self) -> None:
        """Start or join Ray and reserve the bundles.
        Raises LostError: the cluster cannot hold the bundles in time, with what was asked and what is there: a machine
        of it may be on its way back."""
        if self.is_local:
            self.bundles = list(self._plan(self.world))
            os.environ.update(_LOCAL_RAY)
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        import ray  # after the environment: Ray reads it when imported

        self._ray, deadline = ray, time.monotonic() + START_TIMEOUT_S
        # Ray's own handlers would end this process in Ray's way, and its threads print what they hear of errors.
        ray._private.utils.set_sigterm_handler = lambda handler: None
        ray._private.worker.print_to_stdstream = _to_log
        with hold_signals():  # half a start cannot be shut down, and Ray's C++ takes SIGTERM for itself
            self._init(ray)
        if not self.is_local:
            self._await_nodes(ray, deadline)
            self.world = World.of(ray.nodes())
            self.bundles = list(self._plan(self.world))
        self._reserve(ray, deadline)
        if not self.is_local:
            self.world = World.of(ray.nodes())  # machines may have joined while there was no room yet
        log.info("Ray runs: %d GPUs, machines %s; %d actors", self.world.gpus, self.world.addresses, len(self.bundles))

    def _init(self, ray: Any) -> None:
        if self.is_local:
            _leave_out(ray, _ONLOOKERS)
            try:
                ray.init(
                    num_cpus=max(int(sum(b.num_cpus for b in self.bundles)) + 1, 2),
                    include_dashboard=False,
                    namespace=self.namespace,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=self.temp_dir,
                )
            except Exception as error:  # Ray's own, without a class of theirs
                raise LostError(
                    f"Ray did not start on this machine: {error} It has 30 s for that: is the machine busy "
                    f"(load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores), or out of memory or disk?"
                ) from error
        else:
            ray.init(namespace=self.namespace, log_to_driver=False, configure_logging=False)

    def _reserve(self, ray: Any, deadline: float) -> None:
        own = None if self.is_local else ray.util.get_node_ip_address()
        takes_actors = any(n["NodeManagerAddress"] == own and n["Resources"].get("CPU", 0) >= 1 for n in _alive(ray))
        shapes, self._places = placement(self.bundles, own if takes_actors else None)
        nodes = len({bundle.node for bundle in self.bundles if bundle.node is not None})
        self._groups = [
            ray.util.placement_group(shape, strategy="STRICT_SPREAD" if nodes > 1 and number == 0 else "SPREAD")
            for number, shape in enumerate(shapes)
        ]
        if not all(group.wait(max(1.0, deadline - time.monotonic())) for group in self._groups):
            total, alive = ray.cluster_resources(), len(_alive(ray))
            raise LostError(
                f"Ray could not place this run within {START_TIMEOUT_S:.0f} s: asked for {_total(self.bundles)}, the "
                f"cluster has CPU {total.get('CPU', 0):g}, GPU {total.get('GPU', 0):g} on {alive} machines, part of "
                "which others may use. Ask for fewer engines or ranks, or add nodes."
            )

    def _await_nodes(self, ray: Any, deadline: float) -> None:
        """Raises LostError where there are too few machines at the deadline: they may be starting (again)."""
        address, said = os.environ.get("RAY_ADDRESS"), False
        while (alive := len(_alive(ray))) < self._nodes:
            text = f"--actor-num-nodes {self._nodes} asks for {self._nodes} machines; the Ray cluster at {address} has"
            if time.monotonic() > deadline:
                raise LostError(f"{text} {alive}. Start Ray on the others, or ask for fewer.")
            if not said:
                log.warning("%s %d; waiting for the others", text, alive)
                said = True
            time.sleep(1.0)

    def check_sees(self, *files: Path) -> None:
        """That the machines on which there are places of this run see these files, which all of it uses.
        Raises ConfigError: one does not.
        Raises LostError: one does not answer, or cannot run this package."""
        if self.is_local:
            return
        ray, nodes = self._ray, {node["NodeID"]: node["NodeManagerAddress"] for node in _alive(self._ray)}
        tables = [ray.util.placement_group_table(group) for group in self._groups]
        used = {node for table in tables for node in table["bundles_to_node_id"].values()} & set(nodes)
        asking = {
            node: ray.remote(num_cpus=0)(_missing)
            .options(label_selector={"ray.io/node-id": node}, max_retries=0)
            .remote([str(file) for file in files])
            for node in sorted(used)
        }
        for node, missing in asking.items():
            try:
                found = ray.get(missing, timeout=START_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                raise LostError(f"machine {nodes[node]} of the Ray cluster cannot run agentrl: {error}") from error
            if found:
                raise ConfigError(
                    f"machine {nodes[node]} of the Ray cluster does not see {', '.join(found)}. The folder of the run "
                    "(--output-dir) and that of the model must have the same path on all machines: a shared file "
                    "system, or a copy of the model on each."
                )

    def options(self, index: int) -> dict[str, Any]:
        """Actor options that put an actor into bundle ``index``."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self.bundles[index]
        group, place = self._places[index]
        return {
            "num_cpus": bundle.num_cpus,
            "num_gpus": bundle.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._groups[group], placement_group_bundle_index=place
            ),
        }

    def processes(self) -> dict[str, int]:
        """Ids, by name, of the processes of a Ray of our own that everything else needs."""
        found = {}
        for proc in descendants(os.getpid(), include_root=False):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{proc.pid}/comm").read_text().strip()
                if name in _RAY_PROCESSES:
                    found[_RAY_PROCESSES[name]] = proc.pid
        return found

    def stop(self) -> None:
        """End everything this object started. Safe to call twice."""
        ray = self._ray  # not imported here: a signal may have come in the middle of that
        if ray is not None and ray.is_initialized():
            if not self.is_local:
                for group in self._groups:
                    ray.util.remove_placement_group(group)
            with hold_signals():
                ray.shutdown()
        self._groups = []


def _alive(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _missing(files: list[str]) -> list[str]:
    return [file for file in files if not os.path.exists(file)]


def _leave_out(ray: Any, methods: Sequence[str]) -> None:
    for method in methods:
        setattr(ray._private.node.Node, method, lambda self, **options: None)


def _to_log(data: dict[str, Any], *_: Any, **__: Any) -> None:
    log.info("Ray (%s): %s", data["pid"], "\n".join(data["lines"]))


def _total(bundles: Sequence[Bundle]) -> str:
    whole = _sum(bundles)
    return f"CPU {whole['CPU']:g}, GPU {whole.get('GPU', 0):g} for {len(bundles)} actors"
