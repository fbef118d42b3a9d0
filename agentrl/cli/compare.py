"""``agentrl compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.main import WORDS
from agentrl.config.layers import load_options
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.evaluation.compare import Flip, SetComparison

SHOWN = 10
"""Tasks listed in each direction without --all."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Comparison"""

    set: tuple[str, ...] = ()
    """Held-out set to compare; unset: all that both runs have. Repeatable."""
    all: bool = False
    """List every task on which the runs differ."""
    intersect: bool = False
    """Where the runs are of different tasks, compare those that are in both."""
    force: bool = False
    """Compare although the environment, its code or its data have changed between the runs."""
    json: bool = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Compare; returns the exit code."""
    words, rest = leading_words(argv, 2, "compare")
    options = load_options(Options, rest)
    from agentrl.evaluation.compare import compare
    from agentrl.evaluation.results import load

    a, b = (load(path, step=step, segments=False) for path, step in map(place, words))
    compared = compare(a, b, sets=options.set, intersect=options.intersect, force=options.force)
    if options.json:
        from agentrl.data.files import finite

        result = {"a": words[0], "b": words[1], "sets": {c.name: asdict(c) for c in compared}}
        print(json.dumps(finite(result), indent=2, allow_nan=False))
        return 0
    _print(words, compared, options.all)
    return 0


def leading_words(argv: Sequence[str], n: int, command: str) -> tuple[list[str], Sequence[str]]:
    """The ``n`` runs before the first option, and what follows. Raises ConfigError."""
    words = list(takewhile(lambda word: not word.startswith("--"), argv))
    if len(words) != n:
        runs = {1: "one run", 2: "two runs"}[n]
        how = WORDS[command]["synopsis"]
        raise ConfigError(f"agentrl {command} needs {runs} before its options, got {len(words)}: agentrl {how}")
    return words, argv[n:]


def place(word: str) -> tuple[Path, int | None]:
    """``RUN@STEP`` taken apart; a folder whose own name has an ``@`` is that folder."""
    name, _, step = word.rpartition("@")
    if name and step.isdecimal() and not Path(word).expanduser().exists():
        return Path(name), int(step)
    return Path(word), None


def _print(words: Sequence[str], compared: Sequence[SetComparison], everything: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentrl.evaluation.compare import in_words
    from agentrl.processes.signals import printable

    console = Console(highlight=False, soft_wrap=True)

    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style))

    say(f"A  {words[0]}\nB  {words[1]}")
    for c in compared:
        table = Table(title=Text(f"{printable(c.name)}: {tasks(c.n_tasks)} in pairs"), title_justify="left")
        for heading in ("", "A", "B", "B - A", "95 % interval", "p"):
            table.add_column(heading, justify="right" if heading else "left")
        both = (("success", c.success, "{:.1%}", points), ("reward", c.reward, "{:.3f}", plain))
        for what, paired, level, written in both:
            interval = written(paired.low, paired.high) if paired.low == paired.low else "-"
            levels = level.format(paired.a), level.format(paired.b)
            table.add_row(what, *levels, written(paired.difference), interval, f"{paired.p:.2g}")
        table.add_row("episodes", *map(str, c.episodes), "", "", "")
        table.add_row("errors (not scored)", *map(str, c.errors), "", "", "")
        console.print(table)
        for what, paired, _, written in both:
            say(in_words(paired, what, written))
        for note in c.notes:
            say(f"note: {note}", "yellow")
        lists = [(f"{tasks(len(ids))} left out, {why}", ids) for why, ids in c.left_out.items()]
        lists.append((f"{tasks(len(c.gained))} that B solves more often", list(map(_flip, c.gained))))
        lists.append((f"{tasks(len(c.lost))} that B solves less often", list(map(_flip, c.lost))))
        for heading, lines in lists:
            listed = lines if everything else lines[:SHOWN]
            if len(listed) < len(lines):
                listed = [*listed, f"... and {len(lines) - len(listed)} more: --all lists them"]
            say("\n  ".join([heading + (":" if lines else ""), *listed]))
    if len(compared) > 1:
        alpha = 0.05 / len(compared)
        say(f"{len(compared)} sets are tested: one of them counts below p = {alpha:.2g} (Bonferroni).")


def tasks(n: int) -> str:
    """``n`` tasks, in words."""
    return "1 task" if n == 1 else f"{n} tasks"


def points(*shares: float) -> str:
    """Differences of rates, in percentage points."""
    return " to ".join(f"{100 * share:+.1f}" for share in shares) + " points"


def plain(*differences: float) -> str:
    """Differences of rewards."""
    return " to ".join(f"{difference:+.3f}" for difference in differences)


def _flip(flip: Flip) -> str:
    return flip.task_id if {flip.a, flip.b} == {0.0, 1.0} else f"{flip.task_id}  {flip.a:.0%} -> {flip.b:.0%}"
