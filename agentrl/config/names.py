"""Names that are not options here: close spellings, other systems' names, and what is not available yet.

`agentrl train` and `agentrl migrate` read the same tables, so that both say the same of a flag.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from agentrl.loading import toml_beside

_TABLES = toml_beside(__file__, "names.toml")
NOT_AVAILABLE: dict[str, str] = _TABLES["not_available"]
"""Flags (without dashes) that users of slime know and that later versions will take, with what they are for."""
FROM_CHECKPOINT = _TABLES["shape"]["reason"]
IMPLIED: dict[str, str] = _TABLES["implied"] | dict.fromkeys(_TABLES["shape"]["flags"].split(), FROM_CHECKPOINT)
"""Flags of slime that ask for what is so here anyway: accepted with a note, whatever stands behind them."""
RENAMED: dict[str, str | list[str]] = _TABLES["renamed"]
"""Names of the same thing elsewhere, with the flag to use here; of several the first that the command takes."""
ADVICE: dict[str, str] = _TABLES["advice"]
"""Flags of slime that have no flag for themselves here, with what to do."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``name``, or None when nothing is close."""
    found = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def renamed(bare: str, known: Iterable[str]) -> str | None:
    """The flag to use for ``bare``: of several names, one that is among ``known``."""
    names, known = RENAMED.get(bare, ()), list(known)
    if isinstance(names, str):
        return names
    return next((name for name in names if name[2:] in known), None)


def unknown_message(given: str, bare: str, candidates: Iterable[str], *, as_flag: bool) -> str:
    """What to say of an unknown flag or key: ``given`` as the person wrote it, with where (``--lrr`` or ``run.toml:
    lrr``), ``bare`` in flag spelling without dashes, as are the ``candidates``. ``as_flag``: suggest ``--name``, else
    ``name`` with underscores, as in a file."""
    noun = "flag" if as_flag else "key"
    if bare in NOT_AVAILABLE:
        return f"{given}: not available yet: {NOT_AVAILABLE[bare]}."
    if bare in ADVICE:
        return f"Unknown {noun} {given}. {ADVICE[bare]}"
    known = list(candidates)
    right = renamed(bare, known)
    if right is not None:
        return f"Unknown {noun} {given}. Use {right if as_flag else right.lstrip('-').replace('-', '_')}."
    close = nearest(bare, known)
    if close is None:
        return f"Unknown {noun} {given}. `--help` lists all of them."
    return f"Unknown {noun} {given}. Did you mean {'--' + close if as_flag else close.replace('-', '_')}?"
