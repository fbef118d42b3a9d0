"""The text space of agent environments.

``gymnasium.spaces.Text`` lists its characters one by one, so that a space of all Unicode text takes
seconds to build and prints a megabyte. :class:`Unicode` holds any string up to a length instead.
"""

from __future__ import annotations

import multiprocessing
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import create_shared_memory

_SAMPLE_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?'\"<>/{}[]()\n"
_SAMPLE_LENGTH = 64


class Unicode(spaces.Text):
    """Any ``str`` of ``min_length`` to ``max_length`` characters.

    ``sample`` draws short printable text, whatever ``max_length`` is: generic loops call it, and a
    sample as long as the space allows would fill the memory.

    Example:
        >>> space = Unicode(100)
        >>> "naïve 你好" in space, "x" * 101 in space
        (True, False)
        >>> space
        Unicode(0, 100)
    """

    def __init__(
        self,
        max_length: int = 2**24,
        *,
        min_length: int = 0,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        super().__init__(max_length, min_length=min_length, charset=_SAMPLE_CHARACTERS, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string of an allowed length."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draws a short printable string; ``mask`` and ``probability`` as in ``gymnasium.spaces.Text``."""
        if mask is None and probability is None:
            shortest = self.min_length
            longest = max(shortest, min(self.max_length, _SAMPLE_LENGTH))
            mask = (int(self.np_random.integers(shortest, longest + 1)), None)
        return super().sample(mask, probability)

    @property
    def is_np_flattenable(self) -> bool:
        """False: text outside the sampled characters has no index."""
        return False

    def __repr__(self) -> str:
        return f"Unicode({self.min_length}, {self.max_length})"

    def __eq__(self, other: object, /) -> bool:
        return (
            isinstance(other, Unicode) and self.min_length == other.min_length and self.max_length == other.max_length
        )


@create_shared_memory.register(Unicode)
def _no_shared_memory(space: Unicode, n: int = 1, ctx: ModuleType = multiprocessing) -> NoReturn:
    # AsyncVectorEnv turns this error into its advice to pass shared_memory=False.
    raise CustomSpaceError(
        f"{space!r} holds text of any length and has no shared-memory form: pass shared_memory=False to AsyncVectorEnv."
    )
