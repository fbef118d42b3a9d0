"""What an evaluation tells: a table for a person, ``summary.json`` for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.config.presets import demo_alone
from agentrl.config.schema import EvalConfig
from agentrl.data.files import finite, write_text
from agentrl.evaluation.heldout import TRAINING_SPLIT, HeldOutSet
from agentrl.evaluation.metrics import Estimate, EvalSummary
from agentrl.evaluation.results import SUMMARY_VERSION
from agentrl.processes.signals import printable


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

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def write(self, path: Path) -> None:
        """Replace ``path`` atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    def shortcomings(self, tolerated: float) -> list[str]:
        """Why the evaluation is not to be taken for a whole one, in sentences; empty when it is.

        Args:
            tolerated: share of the episodes that may have ended for reasons of infrastructure.
        """
        return [line for name, summary in self.sets.items() for line in self._shortcomings(name, summary, tolerated)]

    def _shortcomings(self, name: str, summary: EvalSummary, tolerated: float) -> Iterator[str]:
        if summary.not_attempted:
            why = f": {self.stopped}" if self.stopped else ""
            yield f"{name}: {summary.not_attempted} of {summary.planned} episodes were not attempted{why}"
        if summary.errors and not summary.success.n:
            reasons = ", ".join(f"{reason} {count}" for reason, count in summary.stop_reasons.items())
            yield (
                f"{name}: not one of {summary.errors} episodes could be scored ({reasons}){self._last()}; their errors "
                "are in trajectories.jsonl of the run folder"
            )
        elif summary.errors > tolerated * summary.planned:
            yield (
                f"{name}: {summary.errors} of {summary.episodes} episodes ended for reasons of infrastructure and are "
                f"not in the score (--fail-on-error {tolerated:g}){self._last()}; their errors are in "
                "trajectories.jsonl"
            )

    def _last(self) -> str:
        return f"; the last: {self.last_error}" if self.last_error else ""

    def tables(self) -> Iterator[Table | Text]:
        """The tables of a terminal: the sets side by side, then categories, agents and parts of the reward."""
        yield _main_table(self.sets) if len(self.sets) <= SIDE_BY_SIDE else _wide_table(self.sets)
        for name, summary in self.sets.items():
            if len(summary.categories) > 1:
                yield _category_table(name, summary)
        for warning in self.warnings:
            yield Text(f"warning: {warning}", style="bold red")


def _words(text: str) -> Text:
    """Names that an environment gave, as they are: no markup of rich, and nothing that a terminal obeys."""
    return Text(printable(text))


def _share(estimate: Estimate) -> str:
    return "–" if math.isnan(estimate.mean) else f"{estimate.mean:.1%}"


def _interval(estimate: Estimate) -> str:
    return "–" if math.isnan(estimate.low) else f"{estimate.low:.1%} – {estimate.high:.1%}"


def _with_error(estimate: Estimate, form: str = ".3f") -> str:
    if math.isnan(estimate.mean):
        return "–"
    error = "" if math.isnan(estimate.stderr) else f" ± {estimate.stderr:{form}}"
    return f"{estimate.mean:{form}}{error}"


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"


ROWS: dict[str, Callable[[EvalSummary], str]] = {
    "success": lambda s: _share(s.success),
    "95 % interval": lambda s: _interval(s.success),
    "reward (± standard error)": lambda s: _with_error(s.reward),
}
SIDE_BY_SIDE = 3
"""Most sets that stand side by side in a table."""

COUNTS: dict[str, Callable[[EvalSummary], str]] = {
    "tasks": lambda s: str(s.success.n_tasks),
    "episodes scored": lambda s: f"{s.success.n} of {s.planned}",
    "errors (not scored)": lambda s: str(s.errors),
    "turns": lambda s: _number(s.turns, ".1f"),
    "tool calls": lambda s: _number(s.tool_calls, ".1f"),
    "tokens generated": lambda s: _number(s.tokens, ".0f"),
    "truncated": lambda s: _number(s.truncation_rate, ".1%"),
    "seconds per episode": lambda s: _number(s.episode_seconds, ".1f"),
    "wall time, s": lambda s: _number(s.seconds, ".0f"),
}


def _title(sets: dict[str, EvalSummary]) -> str:
    training = all(summary.split == TRAINING_SPLIT for summary in sets.values())
    return "Evaluation on the TRAINING split" if training else "Held-out evaluation"


def _label(name: str, summary: EvalSummary) -> Text:
    if summary.split == TRAINING_SPLIT:
        return Text(f"{name} ({summary.split.upper()} SPLIT)", style="red")
    return Text(f"{name} ({summary.split})")


def _wide_table(sets: dict[str, EvalSummary]) -> Table:
    """Of many sets, a row each; what does not fit is in the summary."""
    table = Table(title=_title(sets), title_justify="left")
    for label in ("set", "success", "95 % interval", "reward", "scored", "errors", "turns"):
        table.add_column(label, justify="left" if label == "set" else "right", overflow="fold")
    for name, s in sets.items():
        scored = f"{s.success.n} of {s.planned}"
        reward, turns = _number(s.reward.mean, ".3f"), _number(s.turns, ".1f")
        table.add_row(
            _label(name, s), _share(s.success), _interval(s.success), reward, scored, str(s.errors), turns
        )  # fmt: skip
    return table


def _main_table(sets: dict[str, EvalSummary]) -> Table:
    table = Table(title=_title(sets), title_justify="left")
    table.add_column("")
    for name, summary in sets.items():
        table.add_column(_label(name, summary), justify="right")
    for label, cell in {**ROWS, **_further_rows(sets), **COUNTS}.items():
        table.add_row(_words(label), *(cell(s) for s in sets.values()))
    return table


def _further_rows(sets: dict[str, EvalSummary]) -> dict[str, Callable[[EvalSummary], str]]:
    """pass@k, pass^k, parts of the reward and agents, where some set has them."""
    rows: dict[str, Callable[[EvalSummary], str]] = {}

    def estimate(found: Estimate | None, form: str) -> str:
        return "" if found is None else _with_error(found, form)

    for field_name, sign in (("pass_at_k", "@"), ("pass_hat_k", "^")):
        for k in dict.fromkeys(k for s in sets.values() for k in getattr(s, field_name)):
            rows[f"pass{sign}{k}"] = lambda s, f=field_name, k=k: estimate(getattr(s, f).get(k), ".1%")
    parts = dict.fromkeys(part for s in sets.values() for part in s.reward_parts)
    for part in parts if len(parts) > 1 else ():
        rows[f"reward: {part}"] = lambda s, p=part: f"{s.reward_parts[p]:.3f}" if p in s.reward_parts else ""
    for agent in dict.fromkeys(agent for s in sets.values() for agent in s.agents):
        rows[f"reward of {agent}"] = lambda s, a=agent: estimate(s.agents.get(a), ".3f")
    return rows


def _category_table(name: str, summary: EvalSummary) -> Table:
    table = Table(title=_words(f"{name}, by category"), title_justify="left")
    for label in ("category", "tasks", "success", "95 % interval", "reward", "errors"):
        table.add_column(label, justify="left" if label == "category" else "right")
    for category, score in summary.categories.items():
        table.add_row(
            _words(category), str(score.success.n_tasks), _share(score.success), _interval(score.success),
            _with_error(score.reward), str(score.errors),
        )  # fmt: skip
    return table
