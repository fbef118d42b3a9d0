"""What counts as a reward: one rule, whoever gave it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agentrl.errors import EnvError, shown


def reward_number(value: Any, where: str) -> float:
    """``value`` as a float: a number of Python, NumPy, torch or any other kind, or an array that holds one of them.
    Raises EnvError: it is not one finite number; the text names ``where`` it came from."""
    number = value if type(value) is float else _number(value)
    if number is not None and math.isfinite(number):
        return number
    raise EnvError(f"{where} is {shown(value)}; a finite number is expected.")


def summed(some: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The parts of two rewards, those of one name added."""
    return {name: some.get(name, 0.0) + more.get(name, 0.0) for name in {**some, **more}}


def _number(value: Any) -> float | None:
    """Text is no number, even where Python would read it as one."""
    try:
        item = getattr(value, "item", None)  # NumPy scalars and arrays, torch tensors
        if callable(item):
            value = item()
        return None if isinstance(value, (str, bytes, bytearray)) else float(value)
    except Exception:  # more than one number, or an object whose own conversion raises
        return None
