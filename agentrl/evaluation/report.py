"""What an evaluation tells: a table for a person, ``summary.json`` for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.config.presets import demo_alone
from agentrl.config.schema import EvalConfig
from agentrl.data.files import finite, write_json
from agentrl.evaluation.heldout import TRAINING_SPLIT, HeldOutSet
from agentrl.evaluation.metrics import Estimate, EvalSummary
from agentrl.evaluation.results import SUMMARY_VERSION
from agentrl.processes.signals import printable
from agentrl.progress import Progress


def warnings_before(cfg: EvalConfig, sets: Iterable[HeldOutSet]) -> list[str]:
    """What a person should know of an evaluation before it starts."""
    found = [
        f"{held_out.name} is evaluated on its TRAINING split: this is no held-out score"
        for held_out in sets
        if held_out.split == TRAINING_SPLIT
    ]
    if cfg.n_samples_per_eval_prompt > 1 and cfg.eval_temperature == 0:
        found.append(
            f"{cfg.n_samples_per_eval_prompt} episodes a task, decoded greedily, differ only where the environment "
            "does; give --eval-temperature for pass@k"
        )
    if alone := demo_alone(cfg):
        found.append(alone)
    return found


@dataclass(frozen=True)
class Report:
    """The summaries of an evaluation, by set, and what is said beside them.

    ``stopped``: why not everything was attempted, None when it was. ``last_error``: of the last episode that could not
    be scored.
    """

    sets: dict[str, EvalSummary]
    model: str
    folder: str
    warnings: Sequence[str] = ()
    stopped: str | None = None
    last_error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What ``summary.json`` holds; NaN is None."""
        return finite(
            {
                "schema_version": SUMMARY_VERSION,
                "complete": all(s.complete for s in self.sets.values()),
                "model": self.model,
                "run_folder": self.folder,
                "warnings": list(self.warnings),
                "stopped": self.stopped,
                **self.extra,
                "sets": {name: summary.to_dict() for name, summary in self.sets.items()},
            }
        )

    def print_json(self) -> None:
        """One JSON object on one line of standard output."""
        print(json.dumps(self.to_dict(), allow_nan=False), flush=True)

    def write(self, path: Path) -> None:
        """Replace ``path`` atomically."""
        write_json(path, self.to_dict())

    def tell(self, path: Path, progress: Progress) -> None:
        """Write it to ``path`` and show its tables."""
        self.write(path)
        for part in self.tables():
            progress.log(part)

    def shortcomings(self, tolerated: float) -> list[str]:
        """Why the evaluation is not to be taken for a whole one, in sentences; empty when it is. ``tolerated``: share
        of the episodes that may have ended for reasons of infrastructure."""
        last = f"; the last: {self.last_error}" if self.last_error else ""
        found = []
        for name, s in self.sets.items():
            if s.not_attempted:
                why = f": {self.stopped}" if self.stopped else ""
                found.append(f"{name}: {s.not_attempted} of {s.planned} episodes were not attempted{why}")
            if s.errors and not s.success.n:
                reasons = ", ".join(f"{reason} {count}" for reason, count in s.stop_reasons.items())
                found.append(
                    f"{name}: not one of {s.errors} episodes could be scored ({reasons}){last}; their errors are in "
                    "trajectories.jsonl of the run folder"
                )
            elif s.errors > tolerated * s.planned:
                found.append(
                    f"{name}: {s.errors} of {s.episodes} episodes ended for reasons of infrastructure and are not in "
                    f"the score (--fail-on-error {tolerated:g}){last}; their errors are in trajectories.jsonl"
                )
        return found

    def tables(self) -> Iterator[Table | Text]:
        """The tables of a terminal: the sets side by side, then categories, agents and parts of the reward."""
        yield _main_table(self.sets) if len(self.sets) <= SIDE_BY_SIDE else _wide_table(self.sets)
        for name, summary in self.sets.items():
            if len(summary.categories) > 1:
                rows = [
                    [category, str(c.success.n_tasks), *_rate(c.success), _with_error(c.reward), str(c.errors)]
                    for category, c in summary.categories.items()
                ]
                yield _table(f"{name}, by category", CATEGORY_COLUMNS, rows)
        for warning in self.warnings:
            yield Text(f"warning: {warning}", style="bold red")


CATEGORY_COLUMNS = ("category", "tasks", "success", "95 % interval", "reward", "errors")
SET_COLUMNS = ("set", "success", "95 % interval", "reward", "scored", "errors", "turns")
SIDE_BY_SIDE = 3
"""Most sets that stand side by side in a table."""


def _table(title: str, columns: Iterable[str | Text], rows: Iterable[Iterable[str | Text]]) -> Table:
    """Text in it is as it is: no markup of rich, and nothing that a terminal obeys."""
    table = Table(title=Text(printable(title)), title_justify="left")
    for place, label in enumerate(columns):
        table.add_column(label, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"


def _rate(estimate: Estimate) -> tuple[str, str]:
    """A rate, and its interval."""
    interval = "–" if math.isnan(estimate.low) else f"{estimate.low:.1%} – {estimate.high:.1%}"
    return _number(estimate.mean, ".1%"), interval


def _with_error(estimate: Estimate | None, form: str = ".3f") -> str:
    if estimate is None:
        return ""
    error = "" if math.isnan(estimate.stderr) else f" ± {estimate.stderr:{form}}"
    return "–" if math.isnan(estimate.mean) else f"{estimate.mean:{form}}{error}"


def _title(sets: dict[str, EvalSummary]) -> str:
    training = all(summary.split == TRAINING_SPLIT for summary in sets.values())
    return "Evaluation on the TRAINING split" if training else "Held-out evaluation"


def _label(name: str, summary: EvalSummary) -> Text:
    if summary.split == TRAINING_SPLIT:
        return Text(f"{name} ({summary.split.upper()} SPLIT)", style="red")
    return Text(f"{name} ({summary.split})")


def _wide_table(sets: dict[str, EvalSummary]) -> Table:
    """Of many sets, a row each; what does not fit is in the summary."""
    rows: list[list[Any]] = [
        [_label(name, s), *_rate(s.success), _number(s.reward.mean, ".3f"), f"{s.success.n} of {s.planned}"]
        + [str(s.errors), _number(s.turns, ".1f")]
        for name, s in sets.items()
    ]
    return _table(_title(sets), SET_COLUMNS, rows)


def _main_table(sets: dict[str, EvalSummary]) -> Table:
    all_sets = list(sets.values())
    rows: dict[str, list[str]] = {
        "success": [_rate(s.success)[0] for s in all_sets],
        "95 % interval": [_rate(s.success)[1] for s in all_sets],
        "reward (± standard error)": [_with_error(s.reward) for s in all_sets],
    }
    # pass@k, pass^k, parts of the reward and agents, where some set has them
    for k in dict.fromkeys(k for s in all_sets for k in s.pass_at_k):
        rows[f"pass@{k}"] = [_with_error(s.pass_at_k.get(k), ".1%") for s in all_sets]
    for k in dict.fromkeys(k for s in all_sets for k in s.pass_hat_k):
        rows[f"pass^{k}"] = [_with_error(s.pass_hat_k.get(k), ".1%") for s in all_sets]
    parts = dict.fromkeys(part for s in all_sets for part in s.reward_parts)
    for part in parts if len(parts) > 1 else ():
        rows[f"reward: {part}"] = [f"{s.reward_parts[part]:.3f}" if part in s.reward_parts else "" for s in all_sets]
    for agent in dict.fromkeys(agent for s in all_sets for agent in s.agents):
        rows[f"reward of {agent}"] = [_with_error(s.agents.get(agent)) for s in all_sets]
    rows |= {
        "tasks": [str(s.success.n_tasks) for s in all_sets],
        "episodes scored": [f"{s.success.n} of {s.planned}" for s in all_sets],
        "errors (not scored)": [str(s.errors) for s in all_sets],
        "turns": [_number(s.turns, ".1f") for s in all_sets],
        "tool calls": [_number(s.tool_calls, ".1f") for s in all_sets],
        "tokens generated": [_number(s.tokens, ".0f") for s in all_sets],
        "truncated": [_number(s.truncation_rate, ".1%") for s in all_sets],
        "seconds per episode": [_number(s.episode_seconds, ".1f") for s in all_sets],
        "wall time, s": [_number(s.seconds, ".0f") for s in all_sets],
    }
    columns: list[str | Text] = ["", *(_label(name, s) for name, s in sets.items())]
    return _table(_title(sets), columns, ([label, *cells] for label, cells in rows.items()))
