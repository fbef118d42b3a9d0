"""A published version of the weights: files that any engine can load, whatever the trainer does meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.engines.control import Bucket


@dataclass(frozen=True)
class Snapshot:
    """What the trainer publishes after each update.

    Attributes:
        version: number of rollouts the weights were trained on.
        folder: safetensors files, one a bucket. It is gone once a later version is published.
        buckets: the tensors of each file, in the order of its bytes.
        digest: differs only where the weights do.
    """

    version: int
    folder: str
    buckets: tuple[Bucket, ...]
    digest: int

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def is_there(self) -> bool:
        """Whether it is the last version that was published, and this machine sees it."""
        return Path(self.folder).is_dir()
