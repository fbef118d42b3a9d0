"""Estimates of KL(policy || reference) from a sample of the policy, d = log(policy / reference) of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A", np.ndarray, "Tensor")
IN_REWARD, IN_LOSS = "k1", "low_var_kl"
"""Where ``--kl-loss-type`` is not given."""


def kl_estimate(d: A, kind: str, expm1: Callable[[A], A]) -> A:
    """``k1`` = d, ``k2`` = d^2 / 2, ``k3`` = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html), of the shape of
    ``d``. ``low_var_kl`` is k3 with d limited to [-20, 20] and the outcome to [-10, 10], so that one odd token cannot
    take over a step. ``expm1``: numpy's or torch's."""
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return expm1(-d) + d
    if kind == "low_var_kl":
        d = d.clip(-20, 20)
        return (expm1(-d) + d).clip(-10, 10)
    raise ConfigError(f"--kl-loss-type {kind!r} is not one of k1, k2, k3, low_var_kl")
