"""The token ledger: the only writer of tokens, loss mask, log-probabilities and weight versions.

Invariants, held after every call:

* the four arrays of a segment have equal length;
* ``loss_mask`` is 1 exactly at ids the engine sampled, and each of those carries a finite
  log-probability and a weight version; everywhere else they are 0 and -1;
* a segment only grows at its end, so the ids of turn t are a prefix of those of turn t+1;
* every sampled id is in exactly one segment with mask 1.

Whatever violates one raises :class:`~agentrl.errors.LedgerError`, which is always a defect of ours.
"""

from __future__ import annotations

import numpy as np

from agentrl.errors import LedgerError
from agentrl.types import Generation, Segment

_NO_VERSION = -1
_LARGEST_ID = np.iinfo(np.int32).max
# Rounding of log-softmax can put a certain token this far above log(1) = 0.
_LOGPROB_SLACK = 1e-3


class _Growing:
    """One open segment: arrays that double, so that n appends cost O(final length)."""

    def __init__(self, prompt: np.ndarray) -> None:
        room = max(256, 2 * len(prompt))
        self.length = 0
        self.sampled_end = 0  # one past the last sampled id
        self.prompt_length = len(prompt)
        self.tokens = np.empty(room, np.int32)
        self.mask = np.empty(room, np.uint8)
        self.logprobs = np.empty(room, np.float32)
        self.versions = np.empty(room, np.int32)
        self.extend(prompt, 0, 0.0, _NO_VERSION)

    def extend(self, tokens: np.ndarray, mask: int, logprobs, versions) -> None:
        start, end = self.length, self.length + len(tokens)
        if end > len(self.tokens):
            room = max(end, 2 * len(self.tokens))
            for name in ("tokens", "mask", "logprobs", "versions"):
                old = getattr(self, name)
                new = np.empty(room, old.dtype)
                new[:start] = old[:start]
                setattr(self, name, new)
        self.tokens[start:end] = tokens
        self.mask[start:end] = mask
        self.logprobs[start:end] = logprobs
        self.versions[start:end] = versions
        self.length = end
        if mask and len(tokens):
            self.sampled_end = end
        elif not self.sampled_end:
            self.prompt_length = end

    def close(self) -> Segment:
        n = self.sampled_end
        return Segment(
            self.tokens[:n].copy(),
            self.mask[:n].copy(),
            self.logprobs[:n].copy(),
            self.versions[:n].copy(),
            self.prompt_length,
        )


class TokenLedger:
    """Records one trajectory token by token.

    Example:
        >>> ledger = TokenLedger()
        >>> ledger.start(np.array([1, 2], np.int32))
        >>> ledger.ids
        array([1, 2], dtype=int32)
    """

    def __init__(self) -> None:
        self._segments: list[_Growing] = []

    @property
    def ids(self) -> np.ndarray:
        """int32 ``[n]``, read-only: the current segment, which is the next prompt to send."""
        current = self._current()
        view = current.tokens[: current.length]
        view.flags.writeable = False
        return view

    def __len__(self) -> int:
        """Tokens in the current segment."""
        return self._segments[-1].length if self._segments else 0

    def start(self, prompt_ids: np.ndarray) -> None:
        """Open the first segment with the first prompt, int32 ``[n]``, n ≥ 1."""
        if self._segments:
            raise LedgerError("start() was called twice; a re-rendered history opens new_segment()")
        self._segments.append(_Growing(_checked_ids(prompt_ids, "prompt", minimum=1)))

    def new_segment(self, prompt_ids: np.ndarray) -> None:
        """Close the current segment and open one whose prompt is a re-rendered history.

        What was sampled before stays trained where it was sampled: here it is prompt, mask 0.
        """
        if not self._segments:
            raise LedgerError("new_segment() before start(): there is no segment to follow")
        self._segments.append(_Growing(_checked_ids(prompt_ids, "prompt", minimum=1)))

    def append_sampled(self, generation: Generation) -> None:
        """Append what the engine sampled after :attr:`ids`; mask 1."""
        current = self._current()
        tokens = _checked_ids(generation.tokens, "sampled")
        logprobs = np.asarray(generation.logprobs)
        versions = np.asarray(generation.versions)
        if not len(tokens) == len(logprobs) == len(versions):
            raise LedgerError(
                f"sampled ids, log-probabilities and versions differ in length: "
                f"{len(tokens)}, {len(logprobs)}, {len(versions)}"
            )
        if generation.prompt_tokens and generation.prompt_tokens != current.length:
            raise LedgerError(
                f"the engine answered to a prompt of {generation.prompt_tokens} tokens, "
                f"the ledger holds {current.length}"
            )
        if len(tokens):
            # NaN fails the first comparison, minus infinity the second.
            if not (np.maximum.reduce(logprobs) <= _LOGPROB_SLACK and np.minimum.reduce(logprobs) > -np.inf):
                raise LedgerError("a sampled id has a log-probability that is not finite or above 0")
            if np.minimum.reduce(versions) < 0:
                raise LedgerError("a sampled id has no weight version")
        current.extend(tokens, 1, logprobs, versions)

    def append_env(self, ids: np.ndarray) -> None:
        """Append text that no policy sampled: observations and template tokens; mask 0."""
        self._current().extend(_checked_ids(ids, "environment"), 0, 0.0, _NO_VERSION)

    def segments(self) -> list[Segment]:
        """The segments that hold sampled ids, cut after the last sampled one.

        What follows the last sampled id predicts nothing, so it is not carried to the trainer.
        """
        return [s.close() for s in self._segments if s.sampled_end]

    def _current(self) -> _Growing:
        if not self._segments:
            raise LedgerError("the ledger has no prompt yet; call start() first")
        return self._segments[-1]


def _checked_ids(ids: np.ndarray, what: str, *, minimum: int = 0) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise LedgerError(f"{what} ids must be one row of integers, got {ids.dtype} {ids.shape}")
    if len(ids) < minimum:
        raise LedgerError(f"{what} ids are empty")
    if len(ids) and (np.minimum.reduce(ids) < 0 or (ids.dtype != np.int32 and ids.max() > _LARGEST_ID)):
        raise LedgerError(f"{what} ids must be token ids, got {int(ids.min())}..{int(ids.max())}")
    return ids
