"""Process groups: one per kind of parallelism, over gloo on the CPU and NCCL on GPUs, with a deadline."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from agentrl.config.schema import TrainerOptions
from agentrl.errors import ConfigError
from agentrl.processes.network import LOOPBACK
from agentrl.trainer.megatron import cpu


@dataclass(frozen=True)
class Layout:
    """Where this process stands. Ranks count from 0 in each kind of parallelism."""

    rank: int
    world_size: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    vpp: int = 1
    """Chunks of layers that a rank of an interleaved pipeline has."""
    ep: int = 1
    """Ranks over which experts are spread. Where it is 1, tensor parallelism splits them as all else."""
    ep_rank: int = 0
    edp_rank: int = 0
    """Among the ranks that hold the same experts."""

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def reports(self) -> bool:
        """Whether this rank's losses count in sums over the world: last stage, one per TP group."""
        return self.last_stage and self.tp_rank == 0


def initialize(
    rank: int,
    world_size: int,
    init_method: str,
    options: TrainerOptions,
    listener: socket.socket | None = None,
) -> Layout:
    """Join the world and build Megatron's groups. Every collective ends after
    ``--distributed-timeout-minutes``.

    ``init_method`` says where the ranks meet, as torch writes it: ``file:///path`` of a new file that all of them
    reach, or ``tcp://host:port``, where ``listener`` is rank 0's socket if it listens already. A store on TCP asks
    nobody for a key, so ranks on one machine meet in a file.

    Raises ConfigError: the process already is in a world.
    """
    if dist.is_initialized():
        raise ConfigError("this process already belongs to a process group; use one process a rank")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    timeout = datetime.timedelta(minutes=options.distributed_timeout_minutes)
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
        if not cpu.on_cpu():  # read by cuBLAS, TransformerEngine and NCCL when they start
            os.environ |= {
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
                "NCCL_ALGO": "^NVLS",
            }
    if cpu.on_cpu():
        torch.set_num_threads(options.threads or 1)
        # Ranks on one machine talk over loopback unless the operator chose an interface.
        if init_method.startswith("file:") or LOOPBACK in init_method:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
    store = _store(rank, world_size, init_method, timeout, listener)
    backend = "gloo" if cpu.on_cpu() else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=options.megatron.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=1 if options.expert_model_parallel_size > 1 else None,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed)
    return Layout(
        rank=rank,
        world_size=world_size,
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        ep=parallel_state.get_expert_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        edp_rank=parallel_state.get_expert_data_parallel_rank(),
    )


def _store(
    rank: int, world_size: int, init_method: str, timeout: datetime.timedelta, listener: socket.socket | None
) -> dist.Store:
    where = urlsplit(init_method)
    if where.scheme == "file":
        store = dist.FileStore(where.path, world_size)
        store.set_timeout(timeout)
        return store
    assert where.hostname is not None and where.port is not None  # tcp://host:port
    return dist.TCPStore(
        where.hostname,
        where.port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def shutdown() -> None:
    """Leave the world. May be called twice."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
