"""The trainer's ranks as Ray actors. Each is one :class:`MegatronTrainer`; rank 0 also sends weights.

Every method of :class:`TrainActor` but :meth:`~TrainActor.send` and :meth:`~TrainActor.write` is collective: the driver
calls it on all ranks at once and waits for all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.algorithms import TrainBatch
from agentrl.config.schema import TrainerOptions
from agentrl.data.files import storage_errors
from agentrl.data.writes import Writes
from agentrl.errors import AgentRLError
from agentrl.processes.imports import uncollected
from agentrl.processes.network import LOOPBACK, collectives_on, node_address
from agentrl.processes.pulse import WORK, Pulse
from agentrl.processes.signals import write_log_to
from agentrl.processes.warden import Warden, scratch_folder

if TYPE_CHECKING:
    from agentrl.trainer.megatron.trainer import MegatronTrainer
    from agentrl.weights.publisher import Publisher
    from agentrl.weights.sender import BroadcastSender
    from agentrl.weights.snapshot import Snapshot

log = logging.getLogger(__name__)


class TrainActor:
    """One rank. Usable without Ray: it is an ordinary class until ``ray.remote`` wraps it.

    Args:
        options: what the trainer reads of the run's options.
        publishing: keyword arguments of :class:`~agentrl.weights.publisher.Publisher`, except those that
            follow from the model.
        nodes: machines the ranks are on; with one, they meet on the loopback interface.
        alone: whether engines are on this machine, too.
        log_file: where this process's log goes; None: standard error.
        log_level: how much goes there.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        hf_checkpoint: str,
        options: TrainerOptions,
        *,
        publishing: Mapping[str, Any] | None = None,
        nodes: int = 1,
        alone: bool = True,
        log_file: str | None = None,
        log_level: str = "info",
    ):
        self.rank, self.world_size, self._nodes, self._alone = rank, world_size, nodes, alone
        self._hf_checkpoint, self._options = hf_checkpoint, options
        self._publishing = dict(publishing or {})
        self._publisher: Publisher | None = None
        self._trainer: MegatronTrainer | None = None
        self._sender: BroadcastSender | None = None
        self._listener: socket.socket | None = None
        self._folder: str | None = None
        self._failure: Exception | None = None
        self._put_off = Writes(later=True)
        write_log_to(log_file, log_level, who=f"rank {rank}")

    def meeting_point(self) -> str:
        """Rank 0: where the other ranks will meet this one, for :meth:`start`."""
        if self._nodes == 1:
            self._folder = scratch_folder("ranks-")
            return f"file://{self._folder}/store"
        host = node_address()
        self._listener = socket.create_server((host, 0), backlog=1024)
        return f"tcp://{host}:{self._listener.getsockname()[1]}"

    def start(self, init_method: str) -> None:
        """Join the other ranks and load the model. Heavy imports happen here."""
        os.environ["OMP_NUM_THREADS"] = str(self._options.threads or 1)
        # Threads that wait must sleep: spinning ones made a step 7 times slower on two cores shared with engines.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self._nodes > 1:
            os.environ |= {name: os.environ.get(name, at) for name, at in collectives_on(node_address()).items()}
        try:
            with uncollected():
                from agentrl.trainer.megatron.trainer import MegatronTrainer

            with timed("joined %d ranks and loaded %s", self.world_size, self._hf_checkpoint):
                self._trainer = MegatronTrainer(
                    self.rank,
                    self.world_size,
                    init_method,
                    self._hf_checkpoint,
                    self._options,
                    listener=self._listener,
                )
        except Exception as error:
            self._failure = error
            raise

    def ready(self) -> bool:
        """Returns once the model is loaded; raises what kept it from being so."""
        return self._loaded is not None

    @property
    def _loaded(self) -> MegatronTrainer:
        if self._failure is not None:
            raise self._failure
        if self._trainer is None:
            raise AgentRLError(f"trainer rank {self.rank} was asked to work before it was started")
        return self._trainer

    def infer(self, batch: TrainBatch, names: Sequence[str]) -> dict[str, np.ndarray] | None:
        """See :meth:`MegatronTrainer.infer`; None on ranks other than 0."""
        with WORK.on("the log-probabilities"):
            columns = self._loaded.infer(batch, names)
        return columns if self.rank == 0 else None

    def update(
        self,
        batch: TrainBatch,
        columns: Mapping[str, np.ndarray],
        *,
        num_steps: int = 1,
        keep: bool = False,
        critic_only: bool = False,
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """See :meth:`MegatronTrainer.update`. ``columns`` are those that the batch got since it was made; what is
        handed back of tokens is on rank 0 only."""
        with WORK.on("the training step"), timed("trained %d steps on %d tokens", num_steps, batch.num_tokens):
            metrics, kept = self._loaded.update(
                batch.with_columns(**columns), num_steps=num_steps, keep=keep, critic_only=critic_only
            )
        return metrics, kept if self.rank == 0 else {}

    def refresh_reference(self) -> None:
        """See :meth:`MegatronTrainer.refresh_reference`."""
        self._loaded.refresh_reference()

    def save(self, path: str, *, later: bool = False) -> None:
        """See :meth:`MegatronTrainer.save`. With ``later`` copies are made, and :meth:`write` writes them.

        Raises StorageError when the disk is full.
        """
        with storage_errors(path), timed("copied the state for %s" if later else "saved %s", path):
            self._loaded.save(path, self._put_off if later else None)

    def load(self, path: str) -> None:
        """See :meth:`MegatronTrainer.load`."""
        with timed("loaded %s", path):
            self._loaded.load(path)

    def save_hf(self, path: str, *, later: bool = False) -> None:
        """See :meth:`MegatronTrainer.save_hf`; ``later`` and errors as of :meth:`save`."""
        with storage_errors(path):
            self._loaded.save_hf(path, self._put_off if later else None)

    def write(self) -> None:
        """Beside whatever else this rank does: write what was saved for later. Raises StorageError when the disk is
        full."""
        with timed("wrote what was copied"):
            self._put_off.finish()

    def gpu(self) -> str:
        """The GPU that Ray gave this rank, as CUDA_VISIBLE_DEVICES has it."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def release_memory(self) -> None:
        """See :meth:`MegatronTrainer.release_memory`."""
        with WORK.on("giving memory back"), timed("gave the memory of the device back"):
            log.info("%d bytes of the device are given back", self._loaded.release_memory())

    def resume_memory(self) -> None:
        """See :meth:`MegatronTrainer.resume_memory`."""
        with WORK.on("having memory again"), timed("had the memory of the device again"):
            self._loaded.resume_memory()

    def publish(self, version: int) -> Snapshot | None:
        """Write the weights of now as ``version``, for engines to load; rank 0 says where. See :class:`Publisher`."""
        if self._publisher is None:
            from agentrl.weights.publisher import Publisher
            from agentrl.weights.sender import BroadcastSender

            core = self._loaded.policy.core
            self._publisher = Publisher(
                core.export,
                rank=self.rank,
                tied_embeddings=core.conversion.tied,
                **self._publishing,
            )
            if self.rank == 0:
                backend = "nccl" if core.device.type == "cuda" else "gloo"
                host = LOOPBACK if self._alone else node_address()
                self._sender = BroadcastSender(self._publisher, backend=backend, host=host)
                if not os.path.isdir(folder := self._publishing["folder"]):
                    # On another machine than the driver, whose warden would remove it when this process ends.
                    Warden(temp_dirs=[folder]).start()
        with WORK.on("publishing the weights"), timed("published version %d", version):
            return self._publisher.publish(version)

    def send(self, method: str, *args: Any) -> Any:
        """Rank 0, beside whatever else it does: call a method of its :class:`BroadcastSender`."""
        if self._sender is None:
            raise AgentRLError(f"rank {self.rank} was asked for {method!r} before it published any weights")
        return getattr(self._sender, method)(*args)

    def pulse(self, seconds: float, stall: float) -> Pulse:
        """After ``seconds``, how this process is; see :mod:`agentrl.orchestrator.watch`."""
        time.sleep(seconds)
        return WORK.pulse(stall)

    def close(self) -> None:
        """Leave the process groups."""
        if self._sender is not None:
            self._sender.abort()
        if self._publisher is not None:
            self._publisher.remove()
        if self._trainer is not None:
            self._trainer.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def timed(what: str, *args: Any) -> Iterator[None]:
    """Say in the log that this was done, and how long it took."""
    began = time.monotonic()
    yield
    log.info(f"{what} in %.2f s", *args, time.monotonic() - began)
