"""What is trained on: the sequences of a rollout end to end, as ids, lengths and named columns. No padding."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from agentrl.errors import DataError, LedgerError
from agentrl.types import Group, Outcome, Trajectory


@dataclass(frozen=True)
class TrainBatch:
    """S sequences (segments with sampled tokens) of R trajectories, T tokens in all. A few long arrays, so that Ray
    hands it to every rank without a copy.

    ``tokens`` int32[T]; ``loss_mask`` uint8[T], 1 where the policy sampled; ``lengths`` int32[S].
    ``trajectory_of`` int32[S] is the number of a sequence's trajectory, ``segments`` int32[S] its own number in it.
    ``trajectory_ids``, ``group_ids``, ``episode_ids``, ``rewards`` float64[R], ``turn_rewards`` and ``truncated``
    bool[R] (a budget ended it) are of the trajectories, in order. What is compared shares a group; what stays in one
    optimizer step shares an episode.

    ``columns`` are arrays [T], 0 where nothing was sampled: ``rollout`` (log-probabilities of the engine that
    sampled) and ``versions`` from the start; ``old``, ``ref`` as the trainer infers them; ``advantage`` as the
    algorithm gives it.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    trajectory_of: np.ndarray
    segments: np.ndarray
    trajectory_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    episode_ids: tuple[str, ...]
    rewards: np.ndarray
    turn_rewards: tuple[tuple[float, ...], ...]
    truncated: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.offsets[-1])
        arrays = {"tokens": self.tokens, "loss_mask": self.loss_mask, **self.columns}
        if wrong := {name: len(array) for name, array in arrays.items() if len(array) != total}:
            raise LedgerError(f"token arrays must have sum(lengths) = {total} entries; got {wrong}")
        if self.loss_mask[self.offsets[:-1][self.lengths > 0]].any():
            raise LedgerError(
                "the first token of a sequence is marked as sampled; nothing can predict it, so a "
                "segment must start with at least one prompt token (mask 0)"
            )
        if "rollout" in self.columns and not np.isfinite(self.columns["rollout"][self.loss_mask == 1]).all():
            raise LedgerError("a sampled token has a log-probability that is not finite")

    @classmethod
    def from_groups(cls, groups: Iterable[Group], chosen: Collection[str]) -> TrainBatch:
        """All segments with sampled tokens of the trajectories with a ``chosen`` id, in the order given.
        Raises DataError: a trajectory id occurs twice.
        Raises LedgerError: arrays of a segment differ in length, or a first token is marked as sampled."""
        trajectories = [t for group in groups for t in group.trajectories if t.trajectory_id in chosen]
        ids = tuple(t.trajectory_id for t in trajectories)
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise DataError(
                f"trajectory id {twice!r} occurs twice in one batch; ids must be unique over all groups, or one "
                "trajectory would be trained on twice"
            )
        parts = [(n, i, s) for n, t in enumerate(trajectories) for i, s in enumerate(t.segments) if s.num_sampled]

        def joined(name: str, dtype: type) -> np.ndarray:
            return np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(s, name), dtype) for *_, s in parts)])

        return cls(
            tokens=joined("tokens", np.int32),
            loss_mask=joined("loss_mask", np.uint8),
            columns={"rollout": joined("logprobs", np.float32), "versions": joined("versions", np.int32)},
            lengths=np.array([len(s) for *_, s in parts], np.int32),
            trajectory_of=np.array([n for n, *_ in parts], np.int32),
            segments=np.array([i for _, i, _ in parts], np.int32),
            trajectory_ids=ids,
            group_ids=tuple(t.group_id for t in trajectories),
            episode_ids=tuple(t.episode_id for t in trajectories),
            rewards=np.array([t.reward for t in trajectories], np.float64),
            turn_rewards=tuple(tuple(t.turn_rewards) for t in trajectories),
            truncated=np.array([t.outcome is Outcome.TRUNCATED for t in trajectories], bool),
        )

    def with_columns(self, **columns: np.ndarray) -> TrainBatch:
        """A copy with these columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def note_trained(
        self, trajectories: Iterable[Trajectory], columns: Mapping[str, np.ndarray], *, tokens: bool
    ) -> None:
        """Write into trajectories what they were trained with: ``advantage`` (the mean over the sampled tokens) and,
        with ``tokens``, each column into the ``trained`` arrays of their segments."""
        by_id = {t.trajectory_id: t for t in trajectories}
        of_tokens = {name: values for name, values in columns.items() if tokens and values.dtype.kind == "f"}
        at = self.offsets.tolist()
        for n, (start, end) in enumerate(zip(at, at[1:], strict=False)):
            segment = by_id[self.trajectory_ids[self.trajectory_of[n]]].segments[self.segments[n]]
            segment.trained = {name: values[start:end] for name, values in of_tokens.items()}
        for name, advantage in zip(self.trajectory_ids, self.means(columns["advantage"]), strict=True):
            by_id[name].advantage = float(advantage)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, column: str) -> np.ndarray:
        try:
            return self.columns[column]
        except KeyError:
            raise DataError(
                f"the batch has no column {column!r}, only {', '.join(self.columns)}; an algorithm names what the "
                'trainer is to infer before credit is given: needs = ("old", "ref")'
            ) from None

    def steps(self, wanted: int) -> int:
        """Optimizer steps that are made of the ``wanted``: an episode is never split over several."""
        return max(1, min(wanted, self.num_episodes))

    # -- borders ----------------------------------------------------------------------------------

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64[S + 1]: where each sequence begins, and the end."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def sequence(self) -> np.ndarray:
        """int64[T]: the sequence of each token."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def trajectory(self) -> np.ndarray:
        """int64[T]: the trajectory of each token."""
        return self.trajectory_of.astype(np.int64)[self.sequence]

    @cached_property
    def group(self) -> np.ndarray:
        """int64[T]: the group of each token, numbered as :attr:`group_of`."""
        return self.group_of[self.trajectory]

    @cached_property
    def turn(self) -> np.ndarray:
        """int64[T]: the turn of each sampled token, counted through the batch; of others that of the turn before.

        A turn is a run of sampled tokens: between two of them stands at least one token of the template.
        """
        mask = self.loss_mask.astype(np.int8)
        return np.cumsum(np.diff(mask, prepend=np.int8(0)) == 1) - 1

    @cached_property
    def turns_of(self) -> np.ndarray:
        """int64[R]: turns of each trajectory, over all its segments."""
        first = np.diff(self.turn, prepend=-1) == 1
        return np.bincount(self.trajectory[first], minlength=self.num_trajectories)

    @cached_property
    def turn_in_trajectory(self) -> np.ndarray:
        """int64[T]: the turn of each sampled token, counted in its trajectory from 0."""
        before = np.cumsum(self.turns_of) - self.turns_of
        return np.maximum(self.turn - before[self.trajectory], 0)

    @cached_property
    def rewards_of_turns(self) -> np.ndarray:
        """float64[R, K]: the reward of each turn, 0 after a trajectory's last one.

        Where rewards and turns do not match in number (a custom generate function gives one for all), the whole reward
        is that of the last turn; so is what the trajectory earned beside its turns.
        """
        rewards = np.zeros((self.num_trajectories, int(self.turns_of.max(initial=0))))
        for row, given, turns, whole in zip(rewards, self.turn_rewards, self.turns_of, self.rewards, strict=True):
            if len(given) == turns:
                row[:turns] = given
            rest = whole - math.fsum(row)
            if abs(rest) > 1e-9 and turns:
                row[turns - 1] += rest
        return rewards

    @property
    def in_loss(self) -> np.ndarray:
        """bool[T]: tokens that are in the loss if they were sampled: all, or what the column ``in_loss`` says."""
        return self.columns["in_loss"] != 0 if "in_loss" in self.columns else np.ones(self.num_tokens, bool)

    @cached_property
    def group_of(self) -> np.ndarray:
        """int64[R]: the number of each trajectory's group, in the order of first appearance."""
        number = {name: n for n, name in enumerate(dict.fromkeys(self.group_ids))}
        return np.array([number[name] for name in self.group_ids], np.int64)

    # -- counts and sums --------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectory_ids)

    @property
    def num_episodes(self) -> int:
        return len(set(self.episode_ids))

    @property
    def sampled_of(self) -> np.ndarray:
        """int64[S]: sampled tokens of each sequence."""
        return np.bincount(self.sequence[self.loss_mask == 1], minlength=len(self))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """float64[R]: per-token ``values`` summed over the sampled tokens of each trajectory, all its segments."""
        return np.bincount(self.trajectory, weights=values * self.loss_mask, minlength=self.num_trajectories)

    def means(self, values: np.ndarray) -> np.ndarray:
        """float64[R]: the mean of per-token ``values`` over the sampled tokens of each trajectory."""
        return self.sums(values) / np.maximum(self.sums(np.ones(self.num_tokens)), 1)

    def sums_of_turns(self, values: np.ndarray) -> np.ndarray:
        """float64[R, K]: per-token ``values`` summed over the sampled tokens of each turn."""
        shape = self.num_trajectories, int(self.turns_of.max(initial=0))
        place = self.trajectory * shape[1] + self.turn_in_trajectory
        return np.bincount(place, weights=values * self.loss_mask, minlength=shape[0] * shape[1]).reshape(shape)

    def from_here(self, values: np.ndarray) -> np.ndarray:
        """float64[T]: per-token ``values`` summed from each token to the end of its trajectory, over sampled ones."""
        own = values * self.loss_mask.astype(np.float64)
        return np.cumsum(self.sums(own))[self.trajectory] - np.cumsum(own) + own

    def spread(self, values: np.ndarray) -> np.ndarray:
        """float32[T]: a number a trajectory, [R], or one a turn, [R, K], on each sampled token of it; 0 elsewhere. One
        column, [R, 1], is of all turns."""
        values = np.asarray(values, np.float32)
        if values.ndim == 2:
            return self.loss_mask * values[self.trajectory, np.minimum(self.turn_in_trajectory, values.shape[1] - 1)]
        return self.loss_mask * values[self.trajectory]
