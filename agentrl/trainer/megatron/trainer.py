"""One rank of the trainer: its place in the world and the models it holds. Free of Ray.

Every method is collective: all ranks of the world call it with the same arguments.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from agentrl.algorithms import TrainBatch, load_algorithm
from agentrl.config.schema import TrainerOptions
from agentrl.data.writes import Writes
from agentrl.errors import ConfigError
from agentrl.trainer.megatron import parallel
from agentrl.trainer.megatron.core import Core
from agentrl.trainer.megatron.critic import Critic
from agentrl.trainer.megatron.policy import Policy


class MegatronTrainer:
    """The models in training on Megatron-core, as one of ``world_size`` ranks.

    Args:
        init_method: where the ranks meet, as torch writes it; see :func:`parallel.initialize`.
        hf_checkpoint: directory the weights, the architecture and the tokenizer files come from.
        listener: rank 0 only: a socket that already listens at the port of ``init_method``.

    Raises:
        ConfigError: sizes that do not fit, unknown Megatron options, an unknown architecture or algorithm.
        CheckpointError: the checkpoint directory is not usable.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        init_method: str,
        hf_checkpoint: str | Path,
        options: TrainerOptions,
        *,
        listener: socket.socket | None = None,
    ):
        self.options = options
        self.algorithm = load_algorithm(options)
        self.layout = parallel.initialize(rank, world_size, init_method, options, listener)
        try:
            self.critic = Critic.of(hf_checkpoint, options, self.layout, self.algorithm)
            alone = options.num_critic_only_steps * (options.num_steps_per_rollout or 1) if self.critic else 0
            steps = options.total_steps - alone
            self.policy = Policy(Core(hf_checkpoint, options, self.layout, total_steps=steps), self.algorithm)
        except BaseException:
            parallel.shutdown()
            raise
        self._saves_reference = bool(options.ref_update_interval)
        self.parts: dict[str, Core] = {"policy": self.policy.core}
        if self.critic is not None:
            self.parts["critic"] = self.critic.core
        """The models by the names they have in a checkpoint."""

    def infer(self, batch: TrainBatch, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns float32[T] of these names: ``old`` and ``ref``, log-probabilities before the update, and the critic's
        ``values``.
        Raises ConfigError: no model computes one of them."""
        models: list[Policy | Critic] = [self.policy] if self.critic is None else [self.policy, self.critic]
        of = {column: model for model in models for column in model.columns}
        if wrong := [name for name in names if name not in of]:
            raise ConfigError(f"no model computes {', '.join(wrong)}; the trainer infers {', '.join(of)}")
        return {name: of[name].infer(batch, name) for name in names}

    def update(
        self, batch: TrainBatch, *, num_steps: int = 1, keep: bool = False, critic_only: bool = False
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Update the policy, unless ``critic_only``, and the critic, if there is one. See :meth:`Policy.update`."""
        # The policy first: its engine may disagree, and then nothing is to have changed.
        metrics, kept = ({}, {}) if critic_only else self.policy.update(batch, num_steps=num_steps, keep=keep)
        return metrics | ({} if self.critic is None else self.critic.update(batch, num_steps=num_steps)), kept

    def refresh_reference(self) -> None:
        """The weights of now become the reference."""
        self.policy.reference.keep()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, see :meth:`Core.export`."""
        return self.policy.core.export()

    def save_hf(self, target: str | Path, writes: Writes | None = None) -> None:
        """Write the policy as a Hugging Face directory; of ``writes`` that wait, what is to be written is a copy."""
        self.policy.core.save_hf(target, writes)

    def save(self, folder: str | Path, writes: Writes | None = None) -> None:
        """Write each part into a folder of its name; see :meth:`save_hf` for ``writes``."""
        for name, part in self.parts.items():
            part.save(Path(folder) / name, writes)
        if self._saves_reference and self.policy.reference:
            self.policy.save_reference(Path(folder) / "reference", writes)

    def load(self, folder: str | Path) -> None:
        """Go on from a folder that :meth:`save` wrote; see :meth:`Core.load`."""
        if self.policy.reference and (reference := Path(folder) / "reference").is_dir():
            self.policy.load_reference(reference)
            self._saves_reference = True  # also of a run that refreshes it no more
        for name, part in self.parts.items():
            part.load(Path(folder) / name)

    def release_memory(self) -> int:
        """Have no memory on the device, until :meth:`resume_memory`; bytes that were given back."""
        return sum(part.release_memory() for part in self.parts.values())

    def resume_memory(self) -> None:
        """Have it again: no other method may be called before. See :meth:`Core.resume_memory`."""
        for part in self.parts.values():
            part.resume_memory()

    def close(self) -> None:
        """Leave the process groups."""
        parallel.shutdown()
