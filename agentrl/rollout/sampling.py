"""Sampling parameters: what they may be, and how they are written for SGLang's ``/generate``."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

from agentrl.errors import ConfigError
from agentrl.types import SamplingParams, replace


def check_sampling(params: SamplingParams) -> SamplingParams:
    """``params``, or a :class:`~agentrl.errors.ConfigError` that names the field, the value and the range."""
    p = params
    for name, allowed, text in (
        ("temperature", math.isfinite(p.temperature) and p.temperature >= 0, "at least 0"),
        ("top_p", 0 < p.top_p <= 1, "in (0, 1]"),
        ("top_k", p.top_k == -1 or p.top_k >= 1, "-1 (off) or at least 1"),
        ("max_new_tokens", p.max_new_tokens >= 1, "at least 1"),
    ):
        if not allowed:
            raise ConfigError(f"sampling parameter {name} is {getattr(p, name)!r}; it must be {text}")
    return params


def greedy(params: SamplingParams) -> SamplingParams:
    """The same budget and stops, without chance (evaluation)."""
    return replace(params, temperature=0.0, top_p=1.0, top_k=-1)


@functools.lru_cache(maxsize=1024)
def for_turn(
    params: SamplingParams,
    *,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """``params`` with a turn's budget, and further stops joined to its own."""
    return replace(
        params,
        max_new_tokens=max_new_tokens,
        stop=tuple(dict.fromkeys((*params.stop, *stop))),
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *stop_token_ids))),
    )


def turn_seed(seed: int, conversation: str, turn: int) -> int:
    """Seed of one request, 63 bits: of the run's ``seed``, the id of the agent's trajectory and the number of its turn.

    Nothing else goes in (no attempt, engine or time), so that whatever is played again samples the same.
    """
    digest = hashlib.blake2b(f"{seed}/{conversation}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """The ``sampling_params`` object of a request.

    Stop strings stay in the output: the ids are what counts, and the text is not read.
    """
    fields: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.seed is not None:
        fields["sampling_seed"] = params.seed
    return fields
