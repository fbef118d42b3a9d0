"""What the trainer trains on: ragged numpy arrays, no padding, no torch.

A :class:`TrainBatch` is a few long arrays, so that Ray hands it to every rank without a copy. A
:class:`MicroBatch` is one packed forward pass: sequences end to end, and arrays that have one entry
a *sampled* token, which is all a loss needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from agentrl.errors import LedgerError
from agentrl.types import Group, Segment


@dataclass(frozen=True)
class TrainSample:
    """One segment of a trajectory, ready to train.

    Arrays have one entry a token: ``tokens`` int32, ``loss_mask`` uint8 (1 = the policy sampled it),
    ``logprobs`` float32 (of the policy that sampled it), ``advantages`` float32, ``versions`` int32.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    trajectory_id: str
    group_id: str
    segment: int = 0
    episode_id: str = ""  # where agents share an episode; else the trajectory's

    @classmethod
    def from_segment(
        cls,
        segment: Segment,
        advantage: float,
        *,
        trajectory_id: str,
        group_id: str,
        index: int = 0,
        episode_id: str = "",
    ) -> TrainSample:
        """A sample whose sampled tokens all get ``advantage``."""
        mask = np.asarray(segment.loss_mask, dtype=np.uint8)
        return cls(
            tokens=np.asarray(segment.tokens, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.asarray(segment.logprobs, dtype=np.float32),
            advantages=mask * np.float32(advantage),
            versions=np.asarray(segment.versions, dtype=np.int32),
            trajectory_id=trajectory_id,
            group_id=group_id,
            segment=index,
            episode_id=episode_id,
        )


_TOKEN_ARRAYS = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "advantages": np.float32,
    "versions": np.int32,
}


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass: T tokens in sequences end to end, N of them sampled.

    ``tokens`` int64[T], ``positions`` int64[T] (0 at each sequence's start), ``lengths`` int32 of the
    sequences. ``rows`` int64[N] is where the hidden state stands that predicts a sampled token (the
    token before it), ``targets`` int64[N] the sampled token, ``columns`` int64[N] its place in
    the arrays of the whole batch. The other arrays float32[N], or None.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    columns: np.ndarray
    advantages: np.ndarray
    rollout_logprobs: np.ndarray
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class TrainBatch:
    """Samples of one rollout, concatenated. Token arrays have length ``num_tokens``.

    ``episode_ids`` say what stays in one optimizer step: the trajectories of an episode's agents share one.
    ``old_logprobs`` (default: the rollout's) and ``ref_logprobs`` are filled in by the trainer.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray
    trajectory_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    episode_ids: tuple[str, ...]
    segments: tuple[int, ...]
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    _offsets: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        object.__setattr__(self, "_offsets", offsets)
        total = int(offsets[-1])
        wrong = {n: len(getattr(self, n)) for n in _TOKEN_ARRAYS if len(getattr(self, n)) != total}
        if wrong:
            raise LedgerError(f"token arrays must have sum(lengths) = {total} entries; got {wrong}")
        firsts = offsets[:-1][np.asarray(self.lengths) > 0]
        if self.loss_mask[firsts].any():
            raise LedgerError(
                "the first token of a sample is marked as sampled; nothing can predict it, so a "
                "segment must start with at least one prompt token (mask 0)"
            )
        if not np.isfinite(self.logprobs[self.loss_mask == 1]).all():
            raise LedgerError("a sampled token has a log-probability that is not finite")

    @classmethod
    def from_samples(cls, samples: Iterable[TrainSample]) -> TrainBatch:
        """Concatenate samples in the order given.

        Raises:
            LedgerError: arrays of a sample differ in length, a first token is marked as sampled, or
                the same segment of a trajectory comes twice.
        """
        samples = list(samples)
        seen: set[tuple[str, int]] = set()
        for s in samples:
            counts = {name: len(getattr(s, name)) for name in _TOKEN_ARRAYS}
            if len(set(counts.values())) != 1:
                raise LedgerError(f"sample of trajectory {s.trajectory_id!r}: lengths differ: {counts}")
            if (s.trajectory_id, s.segment) in seen:
                raise LedgerError(f"segment {s.segment} of trajectory {s.trajectory_id!r} comes twice")
            seen.add((s.trajectory_id, s.segment))
        arrays = {
            name: np.concatenate([getattr(s, name) for s in samples]).astype(dtype, copy=False)
            if samples
            else np.zeros(0, dtype)
            for name, dtype in _TOKEN_ARRAYS.items()
        }
        return cls(
            **arrays,
            lengths=np.array([len(s.tokens) for s in samples], dtype=np.int32),
            trajectory_ids=tuple(s.trajectory_id for s in samples),
            group_ids=tuple(s.group_id for s in samples),
            episode_ids=tuple(s.episode_id or s.trajectory_id for s in samples),
            segments=tuple(s.segment for s in samples),
        )

    @classmethod
    def from_groups(cls, groups: Iterable[Group], advantages: Mapping[str, float]) -> TrainBatch:
        """All segments with sampled tokens of all trajectories that have an advantage.

        Args:
            groups: finished groups.
            advantages: ``trajectory_id -> advantage``; trajectories not in it are left out.
        """
        return cls.from_samples(
            TrainSample.from_segment(
                segment,
                advantages[trajectory.trajectory_id],
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                index=index,
                episode_id=trajectory.episode_id,
            )
            for group in groups
            for trajectory in group.trajectories
            if trajectory.trajectory_id in advantages
            for index, segment in enumerate(trajectory.segments)
            if segment.num_sampled
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_trajectories(self) -> int:
        return len(set(self.trajectory_ids))

    @property
    def num_episodes(self) -> int:
        return len(set(self.episode_ids))

    def sampled_in(self, samples: Sequence[int]) -> int:
        """Number of sampled tokens in these samples."""
        o = self._offsets
        return int(sum(self.loss_mask[o[i] : o[i + 1]].sum() for i in samples))

    def with_logprobs(self, **arrays: np.ndarray) -> TrainBatch:
        """A copy with ``old_logprobs`` and/or ``ref_logprobs`` (float32[num_tokens]) set."""
        known = {f.name for f in fields(self)} & {"old_logprobs", "ref_logprobs"}
        if set(arrays) - known:
            raise LedgerError(f"unknown log-probabilities {sorted(set(arrays) - known)}")
        return replace(self, **arrays)

    def micro_batch(self, samples: Sequence[int], *, multiple_of: int = 1) -> MicroBatch:
        """Pack samples end to end, shortest first.

        Args:
            samples: indices into this batch; may be empty (then one masked token runs).
            multiple_of: pad the number of tokens to a multiple of this with one masked extra
                sequence (sequence parallelism needs a multiple of TP).
        """
        order = sorted(samples, key=lambda i: (self.lengths[i], i))
        spans = [np.arange(self._offsets[i], self._offsets[i + 1]) for i in order]
        columns = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        lengths = [int(self.lengths[i]) for i in order]
        pad = -len(columns) % multiple_of or (multiple_of if not spans else 0)
        if pad:
            lengths.append(pad)
        positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
        tokens = np.zeros(len(positions), np.int64)
        tokens[: len(columns)] = self.tokens[columns]
        at = np.flatnonzero(self.loss_mask[columns])
        columns = columns[at]
        old = self.logprobs if self.old_logprobs is None else self.old_logprobs
        return MicroBatch(
            tokens=tokens,
            positions=positions,
            lengths=np.array(lengths, np.int32),
            rows=at - 1,
            targets=tokens[at],
            columns=columns,
            advantages=self.advantages[columns],
            rollout_logprobs=self.logprobs[columns],
            old_logprobs=old[columns],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[columns],
        )
