"""The trainer's ranks as Ray actors. Each is one :class:`MegatronTrainer` and one end of weight sync.

Every method of :class:`TrainActor` is collective: the driver calls it on all ranks at once and waits for all.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.data.files import storage_errors
from agentrl.errors import AgentRLError, WeightSyncError
from agentrl.orchestrator.watch import with_pulse
from agentrl.processes.signals import write_log_to
from agentrl.processes.warden import scratch_folder

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.trainer.batch import TrainBatch

START_TIMEOUT_S = 300.0
"""Longest wait for rank 0's process to be there."""
SENDER_METHODS = ("listen", "connect", "start", "broadcast", "checksums", "save", "drop", "abort")


class TrainActor:
    """One rank. Usable without Ray: it is an ordinary class until ``ray.remote`` wraps it.

    Args:
        rank, world_size: of this process.
        hf_checkpoint: directory of the model.
        options: keyword arguments of :class:`TrainerOptions`.
        sender: keyword arguments of :class:`~agentrl.weights.sender.WeightSender`, save those that
            follow from the model.
        nodes: machines the ranks are on; with one, everything stays on the loopback interface.
        log_file: where this process's log goes; None: standard error.
        log_level: how much goes there.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        hf_checkpoint: str,
        options: Mapping[str, Any],
        *,
        sender: Mapping[str, Any] | None = None,
        nodes: int = 1,
        log_file: str | None = None,
        log_level: str = "info",
    ):
        self.rank, self.world_size, self._nodes = rank, world_size, nodes
        self._hf_checkpoint, self._options = hf_checkpoint, dict(options)
        self._sender_options = dict(sender or {})
        self._trainer: Any = None
        self._listener: socket.socket | None = None
        self._folder: str | None = None
        self._failure: Exception | None = None
        self._sender: Any = None
        write_log_to(log_file, log_level, who=f"rank {rank}")

    def meeting_point(self) -> str:
        """Rank 0: where the other ranks will meet this one, for :meth:`start`."""
        if self._nodes == 1:
            self._folder = scratch_folder("ranks-")
            return f"file://{self._folder}/store"
        host = _node_address()
        self._listener = socket.create_server((host, 0), backlog=1024)
        return f"tcp://{host}:{self._listener.getsockname()[1]}"

    def start(self, init_method: str) -> None:
        """Join the other ranks and load the model. Heavy imports happen here."""
        os.environ["OMP_NUM_THREADS"] = str(self._options.get("threads", 1))
        # Threads that wait must sleep: spinning ones made a step 7 times slower on two cores shared with engines.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            from agentrl.trainer.megatron.trainer import MegatronTrainer, TrainerOptions

            self._trainer = MegatronTrainer(
                self.rank,
                self.world_size,
                init_method,
                self._hf_checkpoint,
                TrainerOptions(**self._options),
                listener=self._listener,
            )
        except Exception as error:
            self._failure = error
            raise

    def ready(self) -> bool:
        """Returns once the model is loaded; raises what kept it from being so."""
        if self._failure is not None:
            raise self._failure
        if self._trainer is None:
            raise AgentRLError(f"trainer rank {self.rank} was asked to work before it was started")
        return True

    def train(self, batch: TrainBatch, *, num_steps: int = 1) -> dict[str, float]:
        """See :meth:`MegatronTrainer.train`."""
        return self._trainer.train(batch, num_steps=num_steps)

    def log_probs(self, batch: TrainBatch, which: str = "actor") -> Any:
        """See :meth:`MegatronTrainer.log_probs`; None on ranks other than 0."""
        values = self._trainer.log_probs(batch, which)
        return values if self.rank == 0 else None

    def save(self, path: str) -> None:
        """See :meth:`MegatronTrainer.save`. Raises StorageError when the disk is full."""
        with storage_errors(path):
            self._trainer.save(path)

    def load(self, path: str) -> None:
        """See :meth:`MegatronTrainer.load`."""
        self._trainer.load(path)

    def save_hf(self, path: str) -> None:
        """See :meth:`MegatronTrainer.save_hf`. Raises StorageError when the disk is full."""
        with storage_errors(path):
            self._trainer.save_hf(path)

    def sender(self, method: str, *args: Any) -> Any:
        """Call a method of this rank's :class:`WeightSender`; the result counts on rank 0 only.

        Raises:
            WeightSyncError: ``method`` is not one of :data:`SENDER_METHODS`.
        """
        if method not in SENDER_METHODS:
            raise WeightSyncError(f"a weight sender has no {method!r}; it has {', '.join(SENDER_METHODS)}")
        if self._sender is None:
            self._sender = self._make_sender()
        result = getattr(self._sender, method)(*args)
        return result if self.rank == 0 else None

    def _make_sender(self) -> Any:
        from agentrl.weights.sender import WeightSender

        trainer, config = self._trainer, self._trainer.bridge.hf_config
        return WeightSender(
            trainer.export,
            rank=self.rank,
            backend="nccl" if trainer.device.type == "cuda" else "gloo",
            tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            num_kv_heads=getattr(config, "num_key_value_heads", None),
            **self._sender_options,
        )

    def pulse(self, seconds: float) -> int:
        """The process id, after ``seconds``; see :mod:`agentrl.orchestrator.watch`."""
        time.sleep(seconds)
        return os.getpid()

    def close(self) -> None:
        """Leave the process groups."""
        if self._sender is not None:
            self._sender.abort()
        if self._trainer is not None:
            self._trainer.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class RankSender:
    """The weight sender of all ranks as the sync's state machine sees it (its ``Sender`` protocol).

    Args:
        ranks: handles of the Ray actors, in the order of their ranks.
    """

    def __init__(self, ranks: Sequence[Any]):
        self._ranks = list(ranks)

    def __getattr__(self, method: str) -> Any:
        if method not in SENDER_METHODS:
            raise AttributeError(method)

        async def call(*args: Any) -> Any:
            calls = [rank.sender.remote(method, *args) for rank in self._ranks]
            return (await asyncio.gather(*(_awaited(c) for c in calls)))[0]

        return call


async def _awaited(ref: Any) -> Any:
    return await ref


def create_ranks(
    cfg: Config, hf_checkpoint: str, placements: Sequence[Mapping[str, Any]], *, log_dir: str | Path | None = None
) -> list[Any]:
    """Start all ranks as Ray actors and have them form their world; returns at once but for rank 0's answer.

    Rank 0 chooses where the others meet it. The first call to a rank waits until its model is loaded.

    Args:
        cfg: the run's configuration.
        hf_checkpoint: directory of the model.
        placements: one dict of Ray actor options a rank.
        log_dir: folder for ``trainer-<rank>.log``.
    """
    import ray

    from agentrl.rollout.setup import has_gpu
    from agentrl.trainer.agreement import Bounds
    from agentrl.trainer.megatron.options import TrainerOptions

    threads = cfg.threads or max(1, (os.cpu_count() or 1) // len(placements))
    stop = Bounds.of(cfg, gpu=has_gpu()).stop
    options = _plain(TrainerOptions.from_config(cfg, threads=threads, logprob_abs_diff_stop=stop))
    sender = {
        "bucket_bytes": cfg.update_weight_buffer_size,
        "timeout": float(cfg.engine_timeout),
        "tp": cfg.rollout_num_gpus_per_engine if has_gpu() else 1,
    }
    actor = with_pulse(TrainActor)
    ranks = [
        actor.options(**placement).remote(
            rank,
            len(placements),
            hf_checkpoint,
            options,
            sender=sender,
            nodes=cfg.actor_num_nodes,
            log_file=str(Path(log_dir) / f"trainer-{rank}.log") if log_dir else None,
            log_level=cfg.log_level,
        )
        for rank, placement in enumerate(placements)
    ]
    init_method = ray.get(ranks[0].meeting_point.remote(), timeout=START_TIMEOUT_S)
    for rank in ranks:
        rank.start.remote(init_method)
    return ranks


def _plain(options: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def _node_address() -> str:
    import ray.util

    return ray.util.get_node_ip_address()
