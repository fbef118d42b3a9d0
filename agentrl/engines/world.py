"""What a run stands on: GPUs or none, and which machines. Found once, by the driver, and handed to all who ask."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.schema import Config, EvalConfig, ServeOptions
from agentrl.errors import ConfigError

SHARED = 0.4
"""Share of a GPU's memory that an engine takes where it shares the GPU with a trainer that stays in it."""
TURNS = 0.8
"""The same where the trainer is away while engines generate: the rest is for what neither side gives back, such as
CUDA's contexts, libraries' workspaces and NCCL's buffers."""


@dataclass(frozen=True)
class World:
    """The machines of a run.

    Attributes:
        gpus: of all machines together.
        addresses: of each machine, as Ray knows it.
    """

    gpus: int = 0
    addresses: tuple[str, ...] = ("127.0.0.1",)

    @classmethod
    def here(cls) -> World:
        """This machine alone. Looks at its devices, so that torch is not imported."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return cls(len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
        devices = os.listdir("/dev")
        return cls(len([d for d in devices if re.fullmatch(r"nvidia\d+", d)]) or int("dxg" in devices))

    @classmethod
    def of(cls, nodes: Iterable[Mapping[str, Any]]) -> World:
        """A cluster, from what ``ray.nodes()`` says."""
        alive = [node for node in nodes if node["Alive"]]
        gpus = sum(node["Resources"].get("GPU", 0) for node in alive)
        return cls(int(gpus), tuple(node["NodeManagerAddress"] for node in alive))

    @property
    def is_one_machine(self) -> bool:
        """Whether nothing of the run need be reached from another machine."""
        return len(set(self.addresses)) <= 1

    @property
    def has_gpu(self) -> bool:
        return self.gpus > 0

    @property
    def device(self) -> str:
        """Torch's name of it."""
        return "cuda" if self.has_gpu else "cpu"

    @property
    def backend(self) -> str:
        """Of collectives between trainer and engines."""
        return "nccl" if self.has_gpu else "gloo"

    def engine_ranks(self, asked: Config | EvalConfig | ServeOptions) -> int:
        """Processes of one engine."""
        return asked.rollout_num_gpus_per_engine if self.has_gpu else 1

    def weight_sync_transport(self, asked: Config) -> str:
        """The one that was asked for, or else the fastest that there is here.
        Raises ConfigError: it does not work here."""
        shared, way = self.has_gpu and self.is_shared(asked), asked.weight_sync_transport
        if way is None and self.is_one_machine and (shared or not self.has_gpu):
            return "ipc"
        way = way or ("disk" if shared and asked.weight_snapshot_dir else "broadcast")
        if way == "ipc" and not self.is_one_machine:
            raise ConfigError(
                "--weight-sync-transport ipc: engines map memory of the trainer's machine, and this run is on "
                f"{len(set(self.addresses))}. Give broadcast, or disk with a --weight-snapshot-dir that all see."
            )
        if way == "broadcast" and shared:
            raise ConfigError(
                "weights cannot be broadcast where trainer and engines share GPUs: NCCL has no group of two processes "
                "on one. Give --weight-sync-transport ipc, or disk where there are several machines."
            )
        return way

    def is_shared(self, asked: Config) -> bool:
        """Whether engines run on the devices of the trainer's ranks: by ``--colocate``, or because the one rank and
        the one engine of a run have but one GPU."""
        engines = asked.rollout_num_engines or 1 if asked.plays else 0
        ranks = asked.world_size if asked.trains else 0
        alone = (self.gpus, ranks, engines, asked.rollout_num_gpus_per_engine) == (1, 1, 1, 1)
        return asked.takes_turns or alone

    def engine_memory(self, asked: Config) -> float | None:
        """Share of a GPU's memory that an engine takes; None: SGLang's choice for a GPU of its own."""
        return share_of_engines(asked) if self.is_shared(asked) else None


def share_of_engines(asked: Config) -> float:
    """Share of a GPU's memory that an engine takes where it shares the GPU."""
    return TURNS if asked.takes_turns and False not in (asked.offload_train, asked.offload_rollout) else SHARED
