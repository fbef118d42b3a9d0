"""Rewards that hold something open: one object serves every episode of a process."""

from __future__ import annotations

from typing import Any, ClassVar, Self


class SharedReward:
    """Copies of an environment share it; a pickle holds its settings only.

    What it holds open is made by :meth:`_open`, which subclasses of subclasses need not know of.
    """

    _runtime: ClassVar[tuple[str, ...]] = ()
    """Attributes that :meth:`_open` sets."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)  # not in __init__: people write their own and need not call this one's
        self._open()
        return self

    def _open(self) -> None:
        """Sets the attributes named in ``_runtime``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._runtime}
