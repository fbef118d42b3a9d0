"""Rules that go by a name or are functions of one's own: which tasks are handed out, which groups are trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.errors import ConfigError, EnvError, describe
from agentrl.loading import load_object

if TYPE_CHECKING:
    from agentrl.config.schema import Config

T = TypeVar("T")


def own_function(flag: str, spec: str, known: Iterable[str], form: str) -> Callable[..., Any]:
    """The function that ``flag`` names by path, in place of one of the ``known`` names. Raises ConfigError: it is no
    path; the text says that a function of one's own ``form``."""
    if ":" not in spec:
        raise ConfigError(
            f"{flag} {spec}: expected {', '.join(known)}, or a function of your own, module:function or "
            f"file.py:function, that {form}"
        )
    return load_object(spec, flag)


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """What a function of one's own raises is an EnvError that names it."""
    try:
        yield
    except Exception as error:
        raise EnvError(f"{what}: {describe(error)}") from error


def choosing(rule: Callable[..., Iterable[T]], what: str, noun: str, least: int) -> Callable[..., list[T]]:
    """``rule(args, some, ..., num_samples)`` of one's own, held to choose ``least`` to ``num_samples`` of ``some``,
    which are ``noun``. What it raises, or gives that is none of them, is an EnvError."""

    def own(args: Config, some: list[T], *more: Any) -> list[T]:
        with named(what):
            chosen = list(rule(args, list(some), *more))
        there = {id(each) for each in some}
        if strange := [each for each in chosen if id(each) not in there]:
            raise EnvError(f"{what} returned {strange[0]!r:.80}; expected some of the {noun} that it was given")
        if not least <= len({id(each) for each in chosen}) == len(chosen) <= more[-1]:
            raise EnvError(f"{what} returned {len(chosen)} {noun}; expected {least} to {more[-1]} different ones")
        return chosen

    return own
