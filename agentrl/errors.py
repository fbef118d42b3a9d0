"""The error taxonomy. Every error a person can meet derives from :class:`AgentRLError`.

What counts is whose fault it is: a :class:`ConfigError` is the caller's, an
:class:`InfraError` is nobody's (retried, then dropped, never scored), a :class:`LedgerError` is ours.
"""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class AgentRLError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command line returns."""

    exit_code = 1


class ConfigError(AgentRLError):
    """A flag, config key, name or file is wrong. The text says what was given and what to do."""

    exit_code = 2


class DataError(ConfigError):
    """A task file cannot be used. The text names the file and the line."""


class CheckpointError(AgentRLError):
    """A checkpoint is missing, torn or does not fit the model."""

    exit_code = 3


class EnvError(AgentRLError):
    """Code of an environment, tool or reward broke its contract (raised, returned NaN, hung)."""


class InfraError(AgentRLError):
    """Something outside the episode failed (engine, retrieval server, sandbox).

    Raise it from a tool or an env to say "not the model's fault": the trajectory is retried, then
    dropped; it enters no baseline and no score.
    """


class LostError(AgentRLError):
    """A run lost what it cannot replace: a process died or stands still, no engine is left, an answer never came.

    Another start may cure it, and with ``--auto-resume`` makes it.
    """

    exit_code = 5


class EngineError(InfraError):
    """An engine or the router did not answer within the retry policy."""


class WeightSyncError(AgentRLError):
    """A weight update did not bring every engine to the trainer's version."""


class DisagreementError(AgentRLError):
    """Engine and trainer compute different policies from the same weights."""


class GradientError(AgentRLError):
    """Gradients were not finite too often in a row."""


class LedgerError(AgentRLError):
    """A token invariant was violated. Always a defect of ours, never of the environment."""


class StorageError(AgentRLError):
    """The run folder cannot be written: disk full, no permission, or another process owns it."""

    exit_code = 4


def first_few(names: Iterable[str], limit: int = 3) -> str:
    """Names for a message: all of them, or the first ones and how many more there are."""
    names = list(names)
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def shown(value: object) -> str:
    """A value and its type as an error quotes them, cut to a line."""
    text = " ".join(repr(value).split())
    return f"{text[:80]}{'…' if len(text) > 80 else ''} ({type(value).__name__})"


def describe(error: BaseException, frames: int = 3) -> str:
    """``Type: text (file:line in function < ...)``, innermost frame first, file names without folders.

    The frames are those of the author's code, where the error went through any.
    """
    text = f"{type(error).__name__}: {error}"
    stack = (authors_frames(error) or traceback.extract_tb(error.__traceback__))[-frames:]
    if not stack:
        return text
    where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} in {f.name}" for f in reversed(stack))
    return f"{text} ({where})"


_LIBRARIES = tuple(
    {f"{Path(__file__).parent}/", *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))}
)


def authors_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error's traceback that are of an author's code, outermost first: none of ours, no library's."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_authors(frame.filename)]


def is_authors(file: str) -> bool:
    """Whether a source file is of an author: not ours, not of Python, not of an installed package."""
    return not file.startswith((*_LIBRARIES, "<"))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the name that was likely meant, to end an error with; empty where none is near."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f" Did you mean {near[0]!r}?" if near else ""
