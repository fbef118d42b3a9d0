"""Which samples run together: optimizer steps, data-parallel ranks, micro-batches. Pure Python.

Invariants, whatever the lengths (`tests/trainer/test_packing.py` proves them by property tests):

- every sample is scheduled exactly once;
- all samples of one key (an episode, possibly in several segments or by several agents) fall in one step;
- in a step, every data-parallel rank has the same number of micro-batches, as collectives require;
- a micro-batch holds at most ``max_tokens`` tokens, save one whose only sample is longer;
- the outcome is a function of the arguments, so that every rank can compute it alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError

Samples = tuple[int, ...]
"""The samples of one micro-batch."""


@dataclass(frozen=True)
class Step:
    """One optimizer step. ``ranks[r][m]`` are the sample indices of micro-batch m of rank r."""

    ranks: tuple[tuple[Samples, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.ranks[0])

    @property
    def samples(self) -> list[int]:
        """Indices of all samples of the step, ascending."""
        return sorted(i for rank in self.ranks for batch in rank for i in batch)


def schedule(
    lengths: Sequence[int],
    *,
    dp: int = 1,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    num_steps: int = 1,
    keys: Sequence[Hashable] | None = None,
) -> list[Step]:
    """Cut samples into steps, ranks and micro-batches of nearly equal numbers of tokens.

    Args:
        lengths: tokens of each sample.
        dp: data-parallel ranks.
        max_tokens: most tokens in a micro-batch (``--max-tokens-per-gpu``).
        micro_batch_size: most samples in a micro-batch; used when ``max_tokens`` is None.
        num_steps: optimizer steps. Keys are dealt to them in the order they come, as evenly as
            whole keys allow.
        keys: what must not be split over steps (episode ids); default: each sample its own.

    Returns:
        ``num_steps`` steps. Micro-batches can be empty when a step has fewer samples than ranks:
        those ranks still take part in every collective.

    Raises:
        ConfigError: no samples, fewer keys than steps, or limits that are not positive.
    """
    keys = list(range(len(lengths))) if keys is None else list(keys)
    _check(lengths, dp, max_tokens, micro_batch_size, num_steps, keys)
    steps = []
    for samples in _cut_steps(keys, num_steps):
        bins = _pack(samples, lengths, dp, max_tokens, micro_batch_size)
        steps.append(_deal(bins, lengths, dp))
    return steps


def _check(
    lengths: Sequence[int],
    dp: int,
    max_tokens: int | None,
    micro_batch_size: int | None,
    num_steps: int,
    keys: list[Hashable],
) -> None:
    given = f"lengths of {len(lengths)} samples, dp={dp}, max_tokens={max_tokens}, num_steps={num_steps}"
    if len(keys) != len(lengths):
        raise ConfigError(f"schedule: {len(keys)} keys for {len(lengths)} samples; give one each")
    if not len(lengths) or min(lengths) < 1:
        raise ConfigError(f"schedule: nothing to train on ({given}); every sample needs tokens")
    if dp < 1 or num_steps < 1:
        raise ConfigError(f"schedule: dp and num_steps must be at least 1 ({given})")
    limit = max_tokens if max_tokens is not None else micro_batch_size
    if limit is None:
        raise ConfigError("schedule: set max_tokens (--max-tokens-per-gpu) or micro_batch_size")
    if limit < 1:
        raise ConfigError(f"schedule: the micro-batch limit must be at least 1 ({given})")
    if len(set(keys)) < num_steps:
        raise ConfigError(
            f"schedule: {len(set(keys))} episodes cannot fill {num_steps} optimizer steps; lower "
            "--num-steps-per-rollout or see why so few episodes are trainable"
        )


def _cut_steps(keys: list[Hashable], num_steps: int) -> list[list[int]]:
    order = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for sample, key in enumerate(keys):
        steps[order[key] * num_steps // len(order)].append(sample)
    return steps


def _pack(
    samples: list[int], lengths: Sequence[int], dp: int, max_tokens: int | None, micro_batch_size: int | None
) -> list[list[int]]:
    """Bins within the limit, their number a multiple of ``dp``, loads nearly equal.

    Longest first into the lightest bin; more bins, by a sixty-fourth or one a rank, until everything fits.
    """
    longest_first = sorted(samples, key=lambda i: (-lengths[i], i))
    if max_tokens is not None:
        apart = sum(2 * lengths[i] > max_tokens for i in samples)  # no two of these share a bin
        count, micro_batch_size = max(-(-sum(lengths[i] for i in samples) // max_tokens), apart), None
    else:
        assert micro_batch_size is not None  # one of the two is given
        count = -(-len(samples) // micro_batch_size)
    count = _round_up(count, dp)
    while (bins := _fill(longest_first, lengths, count, max_tokens, micro_batch_size)) is None:
        count += _round_up(count // 64, dp)
    return bins


def _fill(
    longest_first: list[int], lengths: Sequence[int], count: int, max_tokens: int | None, max_samples: int | None
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, n) for n in range(count)]
    full: set[int] = set()
    for sample in longest_first:
        while True:
            load, n = heapq.heappop(heap)
            if n not in full:
                break
        if max_tokens is not None and bins[n] and load + lengths[sample] > max_tokens:
            return None
        bins[n].append(sample)
        if max_samples is not None and len(bins[n]) >= max_samples:
            full.add(n)
        heapq.heappush(heap, (load + lengths[sample], n))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], dp: int) -> Step:
    """Give bins to ranks in rounds of ``dp``, the heaviest to the rank with least so far."""
    load = {n: sum(lengths[i] for i in b) for n, b in enumerate(bins)}
    heaviest_first = sorted(load, key=lambda n: (-load[n], n))
    ranks: list[list[Samples]] = [[] for _ in range(dp)]
    totals = [0] * dp
    for start in range(0, len(bins), dp):
        lightest_first = sorted(range(dp), key=lambda r: (totals[r], r))
        for rank, n in zip(lightest_first, heaviest_first[start : start + dp], strict=True):
            ranks[rank].append(tuple(sorted(bins[n])))
            totals[rank] += load[n]
    return Step(tuple(tuple(rank) for rank in ranks))


def _round_up(value: int, multiple: int) -> int:
    return -(-max(value, 1) // multiple) * multiple
