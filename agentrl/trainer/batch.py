"""One packed forward pass: sequences end to end, and arrays with one entry a *sampled* token, all that a loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms.batch import TrainBatch

BORDERS = ("sequence", "trajectory", "turn", "group")


@dataclass(frozen=True)
class MicroBatch:
    """T tokens in sequences end to end, N of them sampled.

    ``tokens`` int64[T], ``positions`` int64[T] (0 at each sequence's start), ``lengths`` int32 of the
    sequences. ``rows`` int64[N] is where the hidden state stands that predicts a sampled token (the
    token before it), ``targets`` int64[N] the sampled token, ``at`` int64[N] its place in the whole batch.
    ``columns`` are those of the batch, [N], and under ``sequence``, ``trajectory``, ``turn`` and ``group`` the number
    in the whole batch of what the token is of, int64[N].
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    at: np.ndarray
    columns: dict[str, np.ndarray]


def micro_batch(batch: TrainBatch, samples: Sequence[int], *, multiple_of: int = 1) -> MicroBatch:
    """Pack sequences of the batch end to end, shortest first; of none, one masked token runs. The number of tokens is
    padded to ``multiple_of`` with one masked extra sequence (sequence parallelism needs a multiple of TP)."""
    order = sorted(samples, key=lambda i: (batch.lengths[i], i))
    spans = [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in order]
    places = np.concatenate(spans) if spans else np.zeros(0, np.int64)
    lengths = [int(batch.lengths[i]) for i in order]
    pad = -len(places) % multiple_of or (multiple_of if not spans else 0)
    if pad:
        lengths.append(pad)
    tokens = np.zeros(sum(lengths), np.int64)
    tokens[: len(places)] = batch.tokens[places]
    sampled = np.flatnonzero(batch.loss_mask[places])
    at = places[sampled]
    return MicroBatch(
        tokens=tokens,
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        lengths=np.array(lengths, np.int32),
        rows=sampled - 1,
        targets=tokens[sampled],
        at=at,
        columns={name: values[at] for name, values in token_columns(batch).items()},
    )


def token_columns(batch: TrainBatch) -> dict[str, np.ndarray]:
    """What a loss may ask of each token, [T]."""
    return {**batch.columns, **{name: getattr(batch, name) for name in BORDERS}}
