"""``agentrl show``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.cli.compare import leading_words
from agentrl.config.layers import load_options
from agentrl.config.options import Count, PathText, Positive
from agentrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from agentrl.evaluation.results import EvalResult
    from agentrl.evaluation.transcript import Decode, Episode


@dataclass(frozen=True, kw_only=True)
class Options:
    """Episodes"""

    failed: bool = False
    """Only episodes that were not solved."""
    task: str | None = None
    """Only episodes of this task: its id (`search/test/17`), or the end of it (`17`)."""
    set: str | None = None
    """Only episodes of this held-out set; of a training run also `train`."""
    step: Count | None = None
    """Of a training run, the episodes after so many rollouts; unset: the newest of each set."""
    index: Count | None = None
    """Only the episode at this place of what is left, from 0."""
    limit: Positive = 3
    """Most episodes shown."""
    tokens: bool | None = None
    """Mark where each token ends. Off (--no-tokens): show messages, not what the model saw. Unset: what the model saw,
    if its tokenizer is found, else messages."""
    hf_checkpoint: PathText | None = None
    """Model folder whose tokenizer is used, in place of the run's own."""


def run(argv: Sequence[str]) -> int:
    """Show; returns the exit code."""
    (path,), rest = leading_words(argv, 1, "show")
    options = load_options(Options, rest)
    from rich.console import Console

    from agentrl.evaluation.results import load
    from agentrl.evaluation.transcript import render, select

    with_tokens, with_training = options.tokens is not False, options.set in (None, "train")
    result = load(path, step=options.step, train=with_training, segments=with_tokens)
    episodes = select(result, set=options.set, task=options.task, failed=options.failed)
    if options.index is not None:
        if options.index >= len(episodes):
            raise DataError(f"--index {options.index}: there are {len(episodes)} such episodes, numbered from 0.")
        shown = [episodes[options.index]]
    else:
        shown = episodes[: options.limit]
    decode = _decode(result, shown, options)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for episode in shown:
        for line in render(episode, decode=decode, boundaries=bool(options.tokens)):
            console.print(line)
    what = "failed episodes" if options.failed else "episodes"
    more = " Others: --index, --task, --limit." if len(shown) < len(episodes) else ""
    console.print(f"{len(shown)} of {len(episodes)} {what}.{more}", markup=False)
    return 0


def _decode(result: EvalResult, shown: Sequence[Episode], options: Options) -> Decode | None:
    """The tokenizer's way back to text; None where messages are shown."""
    from agentrl.evaluation.transcript import decoder

    if options.tokens is False:
        return None
    if not any(t.segments for episode in shown for t in episode.trajectories):
        if options.tokens and shown:
            raise ConfigError(f"--tokens: {result.path} holds no tokens: a server kept them to itself.")
        return None
    try:
        return decoder(result, options.hf_checkpoint)
    except ConfigError:
        if options.tokens or options.hf_checkpoint is not None:
            raise
        return None  # messages can be shown without
