"""The words the synthetic world is named from: the lists of ``names.toml``.

Kept apart from the world because the demo tokenizer needs the same lists: every word here is one token.
"""

from __future__ import annotations

from agentrl.loading import toml_beside


def _words(given: str | list[str]) -> tuple[str, ...]:
    """The words of a text; of two texts, each of the first with each of the second behind it."""
    if isinstance(given, str):
        return tuple(given.split())
    beginnings, endings = given
    return tuple(b + e for b in beginnings.split() for e in endings.split())


_LISTS = toml_beside(__file__, "names.toml")
FIRST_NAMES, SURNAMES, PLACE_WORDS, PLACE_KINDS, COMPANY_WORDS, COMPANY_KINDS = map(_words, _LISTS.values())
WORLD_WORDS = (*FIRST_NAMES, *SURNAMES, *PLACE_KINDS, *PLACE_WORDS, *COMPANY_WORDS, *COMPANY_KINDS)
"""Every word that occurs in a name of the world, each once."""
