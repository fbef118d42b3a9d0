"""Which samples run together: optimizer steps, data-parallel ranks, micro-batches. Pure Python.

Invariants, whatever the lengths (`tests/trainer/test_packing.py` proves them by property tests):

- every sample is scheduled exactly once;
- all samples of one key (an episode, possibly in several segments or by several agents) fall in one step;
- in a step, every data-parallel rank has the same number of micro-batches, as collectives require;
- a micro-batch holds at most ``max_tokens`` tokens, save one whose only sample is longer;
- work is dealt to ranks as evenly as whole samples allow, by what a sample costs and not by its tokens;
- the outcome is a function of the arguments, so that every rank can compute it alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError

Samples = tuple[int, ...]
"""The samples of one micro-batch."""

_LOOKED_AT = 32
"""Micro-batches without room that a sample passes over before more of them are made."""


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
    costs: Sequence[int] | None = None,
    dp: int = 1,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    multiple_of: int = 1,
    num_steps: int = 1,
    keys: Sequence[Hashable] | None = None,
) -> list[Step]:
    """Cut samples into steps, ranks and micro-batches of nearly equal work.

    Args:
        costs: work of each sample, in any unit; default: its tokens.
        max_tokens: most tokens in a micro-batch (``--max-tokens-per-gpu``).
        micro_batch_size: most samples in a micro-batch; used when ``max_tokens`` is None.
        multiple_of: the number of micro-batches of a rank is a multiple of this.
        num_steps: optimizer steps. Keys are dealt to them in the order they come, as evenly as
            whole keys allow.
        keys: what must not be split over steps (episode ids); default: each sample its own.

    Returns:
        ``num_steps`` steps. Micro-batches can be empty when a step has fewer samples than ranks:
        those ranks still take part in every collective.

    Raises:
        ConfigError: no samples, or fewer keys than steps.
    """
    keys = list(range(len(lengths))) if keys is None else list(keys)
    costs = lengths if costs is None else costs
    if not len(lengths) or min(lengths) < 1:
        raise ConfigError(f"schedule: nothing to train on: {len(lengths)} samples; every sample needs tokens")
    if len(set(keys)) < num_steps:
        raise ConfigError(
            f"schedule: {len(set(keys))} episodes cannot fill {num_steps} optimizer steps; lower "
            "--num-steps-per-rollout or see why so few episodes are trainable"
        )
    steps = []
    for samples in _cut_steps(keys, num_steps):
        dearest_first = sorted(samples, key=lambda i: (-costs[i], -lengths[i], i))
        most = None
        if max_tokens is None:
            assert micro_batch_size is not None  # one of the two is given
            most = _round_up(-(-len(samples) // dp), micro_batch_size)
        shares = _fill(dearest_first, lengths, costs, dp, None, most)
        assert shares is not None  # there is room for all
        steps.append(_pack(shares, lengths, costs, max_tokens, micro_batch_size, multiple_of))
    return steps


def _cut_steps(keys: list[Hashable], num_steps: int) -> list[list[int]]:
    order = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for sample, key in enumerate(keys):
        steps[order[key] * num_steps // len(order)].append(sample)
    return steps


def _pack(
    shares: list[list[int]],
    lengths: Sequence[int],
    costs: Sequence[int],
    max_tokens: int | None,
    micro_batch_size: int | None,
    multiple_of: int,
) -> Step:
    """Cut each rank's share into the same number of micro-batches, the smallest in which everything fits.

    It is looked for upwards, by a sixty-fourth at a time.
    """
    if max_tokens is not None:
        micro_batch_size = None
        count = max(max(-(-sum(lengths[i] for i in s) // max_tokens), _apart(s, lengths, max_tokens)) for s in shares)
    else:
        assert micro_batch_size is not None  # one of the two is given
        count = max(-(-len(s) // micro_batch_size) for s in shares)
    while True:
        count = _round_up(count, multiple_of)
        ranks = []
        for share in shares:
            bins = _fill(share, lengths, costs, count, max_tokens, micro_batch_size)
            if bins is None:
                break
            # Ranks that exchange something in each micro-batch, as those that share experts do, then wait least.
            bins.sort(key=lambda samples: -sum(costs[i] for i in samples))
            ranks.append(tuple(tuple(sorted(samples)) for samples in bins))
        else:
            return Step(tuple(ranks))
        count += -(-count // 64)


def _apart(samples: list[int], lengths: Sequence[int], max_tokens: int) -> int:
    """How many samples there are of which no two go into one micro-batch."""
    return sum(2 * lengths[i] > max_tokens for i in samples)


def _fill(
    dearest_first: list[int],
    lengths: Sequence[int],
    costs: Sequence[int],
    count: int,
    max_tokens: int | None,
    max_samples: int | None,
) -> list[list[int]] | None:
    """Each sample into the bin with the least work; where the first few have no room, into that with the fewest tokens.

    None where that has no room either.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    work, tokens = [0] * count, [0] * count
    idlest, emptiest = ([(0, n) for n in range(count)] for _ in range(2))  # heaps; entries of before stay in them
    for sample in dearest_first:
        chosen: int | None = None
        passed_over: list[tuple[int, int]] = []
        while chosen is None and idlest and len(passed_over) < _LOOKED_AT:
            entry = heapq.heappop(idlest)
            n = entry[1]
            if entry[0] == work[n] and (max_samples is None or len(bins[n]) < max_samples):
                passed_over.append(entry)
                if max_tokens is None or not bins[n] or tokens[n] + lengths[sample] <= max_tokens:
                    chosen = n
        if chosen is None:
            while emptiest[0][0] != tokens[emptiest[0][1]]:
                heapq.heappop(emptiest)
            chosen = emptiest[0][1]
            if max_tokens is None or tokens[chosen] + lengths[sample] > max_tokens:
                return None
        bins[chosen].append(sample)
        work[chosen] += costs[sample]
        tokens[chosen] += lengths[sample]
        for entry in (*passed_over, (work[chosen], chosen)):
            heapq.heappush(idlest, entry)
        heapq.heappush(emptiest, (tokens[chosen], chosen))
    return bins


def _round_up(value: int, multiple: int) -> int:
    return -(-max(value, 1) // multiple) * multiple
