"""What a person sees while a run goes on: one live panel in a terminal, one line an event elsewhere.

The panel shows stage, step, reward, held-out success, tokens per second and time left. It runs no thread
of its own beyond rich's refresh (four times a second at most), because two cores are all there is.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.processes.signals import printable
from agentrl.types import Message, Trajectory

record = logging.getLogger(__name__)

_BARS = "▁▂▃▄▅▆▇█"

COUNT_SECONDS = 15.0
"""Between two lines on how many episodes have ended, where there is no terminal."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text. NaN shows as a blank."""
    values = list(values)[-width:]
    finite = [v for v in values if v == v]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(" " if v != v else _BARS[int((v - low) / span * (len(_BARS) - 1))] for v in values)


def clock(seconds: float) -> str:
    """``75`` as ``1:15``."""
    seconds = int(max(seconds, 0))
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


def shown(path: Path) -> str:
    """A path as a person would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


class Progress:
    """Shows a run and logs the same lines. Use as a context manager; ``log`` lines stay above the panel."""

    def __init__(self, title: str, total_steps: int, *, console: Console | None = None):
        self.title = title
        self.total_steps = total_steps
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.started = time.monotonic()
        self.stage_name = "starting"
        self._stage_started = self._counted_at = self.started
        self._steps_started: float | None = None
        self._first_step = 0
        self.step = 0
        self.rewards: list[float] = []
        self.success: list[tuple[int, float]] = []
        self.tokens_per_s = 0.0
        self.detail = ""
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def log(self, text: RenderableType) -> None:
        """Print a line that stays. Control characters in a text, such as those of a server's error, are escaped."""
        if isinstance(text, Text):
            record.info("%s", text.plain)
            if (safe := printable(text.plain)) != text.plain:
                text = Text(safe, style=text.style)
        self.console.print(text)

    def warn(self, text: str | None) -> None:
        """Print a warning that stays; None is no warning."""
        if text is not None:
            self.log(Text(f"[{clock(self.elapsed)}] warning: {text}", style="bold red"))

    def stage(self, name: str) -> None:
        """Say what the run does now."""
        if name == self.stage_name:
            return
        self.stage_name, self._stage_started, self.detail = name, time.monotonic(), ""
        self._counted_at = self._stage_started
        record.info("%s", name)
        if self._live is None:
            self.console.print(f"[{clock(self.elapsed)}] {name}", markup=False)

    def resume_at(self, step: int) -> None:
        """Steps before ``step`` were done by an earlier run and do not count in the time left."""
        self.step = self._first_step = step

    def step_done(self, step: int, reward: float | None, tokens_per_s: float | None, line: str) -> None:
        """A training step is over: ``step`` counts from 1. None where nothing was played."""
        if self._steps_started is None:
            self._steps_started = self._stage_started
        self.step, self.tokens_per_s = step, tokens_per_s or 0.0
        self.rewards += [] if reward is None else [reward]
        self.log(Text(f"[{clock(self.elapsed)}] {line}"))

    def evaluated(self, step: int, success: float, line: str) -> None:
        """A held-out evaluation is over."""
        self.success.append((step, success))
        self.log(Text(f"[{clock(self.elapsed)}] {line}", style="bold"))

    def counted(self, done: int, total: int, away: str = "") -> None:
        """How many episodes of the stage at hand have ended. Without a terminal, a line now and then. ``away``: the
        server for which those that have not begun wait."""
        self.detail = f"{done} of {total} episodes" if total else ""
        if away:
            self.detail += f", no more begin: {away}"
        if self._live is None and total and time.monotonic() >= self._counted_at + COUNT_SECONDS:
            self._counted_at = time.monotonic()
            self.console.print(f"[{clock(self.elapsed)}] {self.stage_name}: {self.detail}", markup=False)

    def first_episode(self, trajectory: Trajectory) -> None:
        """Show the first episode of the run, as soon as there is one."""
        self.log(episode_panel(trajectory, f"the first episode, {clock(self.elapsed)} after the start"))

    def time_left(self) -> float | None:
        """Seconds to the last step at the pace so far, or None before the first."""
        done = self.step - self._first_step
        if not done or self._steps_started is None:
            return None
        return (time.monotonic() - self._steps_started) / done * (self.total_steps - self.step)

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_column()
        waited = clock(time.monotonic() - self._stage_started)
        grid.add_row("stage", Text(f"{self.stage_name} {self.detail} ({waited})"))
        left = self.time_left()
        eta = f"   about {clock(left)} left" if left is not None else ""
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.step, width=40)
        grid.add_row("step", Group(Text(f"{self.step} of {self.total_steps}{eta}"), bar))
        if self.rewards:
            grid.add_row("reward", Text(f"{self.rewards[-1]:.3f}  {sparkline(self.rewards)}"))
        if self.success:
            points = "  ".join(f"step {s}: {v:.0%}" for s, v in self.success[-5:])
            grid.add_row("held-out", Text(points))
        if self.tokens_per_s:
            grid.add_row("tokens/s", Text(f"{self.tokens_per_s:,.0f} generated"))
        grid.add_row("elapsed", Text(clock(self.elapsed)))
        return Panel(grid, title=escape(self.title), border_style="cyan", expand=False)


_ROLE_STYLE = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def message_text(message: Message) -> str:
    """What a message says: reasoning, words, and a line for each call."""
    parts = [f"<think>{thought}</think>"] if (thought := message.get("reasoning_content")) else []
    parts += [text] if (text := message.get("content")) else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        parts.append(f"→ {function.get('name')}({function.get('arguments')})")
    return "\n".join(map(str, parts))


def episode_panel(trajectory: Trajectory, title: str) -> Panel:
    """One episode turn by turn: what the model wrote, what tools answered, how it ended."""
    body: list[RenderableType] = []
    for message in trajectory.messages:
        role = message.get("role", "?")
        style = _ROLE_STYLE.get(role, "")
        if role == "system":
            continue
        text = Text(f"{role:>9}  ", style=f"bold {style}")
        text.append(printable(message_text(message)).replace("\n", "\n           "), style=style)
        body.append(text)
    verdict = "success" if trajectory.success else "no success"
    end = f"{verdict}, reward {trajectory.reward:g}, stopped: {trajectory.stop_reason}, {trajectory.num_turns} turns"
    answer = trajectory.info.get("answer")
    if answer is not None:
        end += f" (right answer: {printable(str(answer))})"
    body.append(Text(end, style="bold"))
    return Panel(Group(*body), title=escape(title), border_style="dim", expand=False)


def when(step: int) -> str:
    """The time of an evaluation, for a person."""
    return "before training" if step == 0 else f"after {step} step{'s' if step > 1 else ''}"


def before_after(rows: list[tuple[str, dict[str, Any], dict[str, Any]]], steps: tuple[int, int]) -> Table:
    """The closing table: of each held-out set the summaries (`EvalSummary.to_dict`) after the first and the last of
    ``steps``."""
    start = "before" if steps[0] == 0 else when(steps[0])
    table = Table(title=f"Held-out tasks, {start} → {when(steps[1])}", title_justify="left")
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    for name, before, after in rows:
        b, a = before["success"], after["success"]
        table.add_row(
            f"{name}: success",
            f"{b['mean']:.1%}  [{b['low']:.0%}, {b['high']:.0%}]",
            f"{a['mean']:.1%}  [{a['low']:.0%}, {a['high']:.0%}]",
            f"{a['mean'] - b['mean']:+.1%}",
        )
        table.add_row(
            f"{name}: reward", f"{before['reward']['mean']:.3f}", f"{after['reward']['mean']:.3f}",
            f"{after['reward']['mean'] - before['reward']['mean']:+.3f}",
        )  # fmt: skip
        for key, label in (("turns", "turns"), ("tool_calls", "tool calls"), ("truncation_rate", "truncated")):
            table.add_row(
                f"{name}: {label}", f"{before[key]:.2f}", f"{after[key]:.2f}", f"{after[key] - before[key]:+.2f}"
            )
    table.add_section()
    numbers = {side["success"]["n_tasks"] for row in rows for side in row[1:]}
    tasks = f"{numbers.pop()} tasks{' of each set' if len(rows) > 1 else ''}, " if len(numbers) == 1 else ""
    table.caption = f"{tasks}95 % interval in brackets"
    return table
