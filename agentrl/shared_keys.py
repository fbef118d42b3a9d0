"""Dictionaries of the same few keys in half of the memory.

A rollout holds messages, calls and records of turns by the ten thousand. Python stores the attributes of
a class's instances as dictionaries that share one table of keys (PEP 412); such a dictionary without its instance is an
ordinary ``dict`` in every other way.
"""

from __future__ import annotations

from typing import Any


class SharedKeys:
    """Makes dictionaries of one kind.

    Example:
        >>> message = SharedKeys()
        >>> message(role="user", content="Hello.")
        {'role': 'user', 'content': 'Hello.'}
    """

    def __init__(self) -> None:
        self._instance = type("Shape", (), {})

    def __call__(self, **values: Any) -> dict[str, Any]:
        record = vars(self._instance())
        for name, value in values.items():  # one by one: update() would give the dictionary a table of its own
            record[name] = value
        return record
