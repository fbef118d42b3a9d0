"""``agentrl eval``: held-out tasks with a model, on engines of its own or behind a server.

Needs no Ray and no Megatron, and nothing heavy at all when a server has the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import sys
import time
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.config.schema import EvalConfig
from agentrl.config.serialize import run_folder_of
from agentrl.data.files import JsonLines, atomic_file, json_line, read_jsonl
from agentrl.data.records import to_record
from agentrl.data.run_folder import RunDir
from agentrl.errors import ConfigError
from agentrl.evaluation.heldout import HeldOutSet, held_out_sets, rehearse_set
from agentrl.evaluation.metrics import EvalSummary, by_episode, is_error, is_whole, summarize
from agentrl.evaluation.play import POLL_SECONDS, Admission, plan, play_set
from agentrl.evaluation.policy import Policy, described, model_folder, model_identity, open_policy, settled
from agentrl.evaluation.record import identity, refuse_other
from agentrl.evaluation.report import Report, warnings_before
from agentrl.evaluation.results import SUMMARY, TRAJECTORIES, read_episodes, read_summaries
from agentrl.processes.signals import cancel_on_signals, write_log_to
from agentrl.processes.warden import Warden
from agentrl.progress import Progress, shown
from agentrl.rollout.setup import scratch
from agentrl.types import Trajectory, replace

DATE = "chat_template_date"
IDENTITY = "evaluation"
"""Key of ``run.json`` that holds what is evaluated."""


def evaluate(cfg: EvalConfig) -> int:
    """Evaluate, or go on with the evaluation in ``--output-dir``, and report.

    Writes ``trajectories.jsonl`` (a line an episode, as it ends), ``summary.json`` and ``run.json`` into the folder.

    Returns:
        The exit code: 0 when all episodes were played and scored (but for the share that ``--fail-on-error`` allows),
        1 otherwise; the same command then goes on where this one stopped.

    Raises:
        AgentRLError: with one message for a person; no process is left by then.
    """
    if cfg.rescore:
        from agentrl.evaluation.rescore import rescore

        return rescore(cfg)
    cfg = _dated(settled(cfg))
    model = model_folder(cfg)
    sets = held_out_sets(cfg, split=cfg.split)
    what = identity(cfg, sets, model_identity(cfg, model))
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_open_folder(cfg, what))
        console = Console(stderr=True, highlight=False) if cfg.json else None
        progress = stack.enter_context(Progress(f"agentrl eval · {run.path.name}", 0, console=console))
        write_log_to(run.logs / "driver.log", cfg.log_level)
        run.describe(policy=described(cfg, model), **{DATE: cfg.chat_template_date})
        session = Session(cfg, sets, run, progress, warnings=warnings_before(cfg, sets))
        about = [f"run folder  {run.path}", f"model       {described(cfg, model)}", f"tasks       {_tasks(sets)}"]
        progress.log(Text("\n".join(about)))
        for warning in session.warnings:
            progress.log(Text(f"warning: {warning}", style="bold red"))
        if session.remaining():
            temporary = stack.enter_context(contextlib.ExitStack())
            temporary.enter_context(scratch(temporary.enter_context(Warden())))
            session.play(model)
        return session.report(model)


def _tasks(sets: Sequence[HeldOutSet]) -> str:
    """How many tasks of each set are played, and of how many."""
    return ", ".join(
        f"{s.name} {len(s.tasks)}" + ("" if s.available in (None, len(s.tasks)) else f" of {s.available}") for s in sets
    )


def _dated(cfg: EvalConfig) -> EvalConfig:
    """``cfg`` with the date that its chat template takes for today: as given, as in an earlier start, or the day's."""
    if cfg.chat_template_date is not None or cfg.base_url is not None:
        return cfg
    date = None
    if cfg.output_dir is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no folder yet, or none that is readable
            date = json.loads((Path(cfg.output_dir) / "run.json").read_text(encoding="utf-8")).get(DATE)
    return cfg.replace(chat_template_date=date or datetime.date.today().isoformat())


def _open_folder(cfg: EvalConfig, what: dict[str, Any]) -> RunDir:
    """A new run folder, or the one of an earlier start of the same evaluation.

    Raises:
        ConfigError: the folder holds a training run, or an evaluation of something else; the text says of what.
    """
    run = RunDir.reopen(cfg)
    if run is None:
        run = RunDir.create(cfg)
        run.describe(**{IDENTITY: what})
        return run
    try:
        before = run.description().get(IDENTITY)
        if before is None and ((run.path / TRAJECTORIES).is_file() or run_folder_of(run.path) == run.path):
            raise ConfigError(
                f"--output-dir {cfg.output_dir} holds another run, not one that `agentrl eval` can go on with. Choose "
                "another folder."
            )
        refuse_other(before or what, what, Path(str(cfg.output_dir)))
        run.note_start()
        run.describe(**{IDENTITY: what})
    except BaseException:
        run.close()
        raise
    return run


@dataclass
class Session:
    """One start of an evaluation: what is there of earlier ones, and what is added."""

    cfg: EvalConfig
    sets: Sequence[HeldOutSet]
    run: RunDir
    progress: Progress
    warnings: list[str] = field(default_factory=list)
    stopped: str | None = None

    def __post_init__(self) -> None:
        self._earlier = {name: s.get("seconds") or 0.0 for name, s in read_summaries(self.run.path / SUMMARY).items()}
        self._seconds = dict.fromkeys((s.name for s in self.sets), 0.0)
        self._ended = self._kept()
        self._last_error: str | None = None
        self._planned = {s.name: plan(s, self.cfg.n_samples_per_eval_prompt) for s in self.sets}

    def _kept(self) -> dict[str, list[Trajectory]]:
        """Set -> episodes of earlier starts; those that failed for reasons of infrastructure are played again.

        So are those of which a kill left only some agents. The file is rewritten without either, in one step.
        """
        file = self.run.path / TRAJECTORIES
        kept: dict[str, list[Trajectory]] = {s.name: [] for s in self.sets}
        if not file.is_file():
            return kept
        lost = False
        for name, trajectories in read_episodes(file, segments=False).items():
            for episode in by_episode(trajectories):
                if is_error(episode) or not is_whole(episode):
                    lost = True
                elif name in kept:
                    kept[name] += map(without_text, episode)
        if lost:
            rewrite(file, {t.trajectory_id for trajectories in kept.values() for t in trajectories})
        return kept

    def _done(self, name: str) -> set[str]:
        return {t.episode_id for t in self._ended[name]}

    def _ended_episodes(self) -> int:
        return sum(len(self._done(name)) for name in self._ended)

    def remaining(self) -> int:
        """Episodes that are still to be played."""
        return sum(len({p.episode_id for p in self._planned[s.name]} - self._done(s.name)) for s in self.sets)

    def play(self, model: str | None) -> None:
        """Play what remains. Whatever happens, what was played is in the folder, with a summary.

        Raises:
            AgentRLError: engines did not start, or cannot answer any more.
            KeyboardInterrupt: after the same cleaning up.
        """
        before = self._ended_episodes()
        if before:
            self.progress.log(Text(f"{before} episodes are there already, {self.remaining()} remain"))
        self.stopped = "it was interrupted"
        self.rehearse()
        try:
            asyncio.run(_until_sigterm(self._play(model)))
        except BaseException:
            if self._ended_episodes() > before:
                self.summary(model).write(self.run.path / SUMMARY)
                self.progress.log(Text(f"stopped early; the same command with --output-dir {self.folder} goes on"))
            raise

    def rehearse(self) -> None:
        """Play one episode of each set without a model, so that what is wrong with its code is said at once."""
        for held_out in self.sets:
            if len(self._done(held_out.name)) < len(self._planned[held_out.name]):
                rehearse_set(self.cfg, held_out)

    async def _play(self, model: str | None) -> None:
        cfg = self.cfg
        limit = cfg.eval_time_limit
        admission = Admission(None if limit is None else time.monotonic() + limit)
        lines = JsonLines(self.run.path / TRAJECTORIES)
        total, done = sum(map(len, self._planned.values())), self._ended_episodes()
        self.progress.stage("starting engines" if model is not None else "connecting to the server")
        try:
            acts_in = [(held_out.spec, held_out.kwargs) for held_out in self.sets]
            async with open_policy(cfg, model, logs=self.run.logs, environments=acts_in) as policy:
                for note in policy.about_template:
                    self.progress.log(Text(note))
                for held_out in self.sets:
                    self.progress.stage(f"evaluating {held_out.name} ({held_out.split})")
                    began = time.monotonic()

                    def on_episode(trajectories: Sequence[Trajectory], name: str = held_out.name) -> None:
                        nonlocal done
                        lines.append(*(to_record(t, set_name=name) for t in trajectories))
                        self._ended[name] += map(without_text, trajectories)
                        done += 1
                        if is_error(trajectories):
                            self._last_error = f"{trajectories[0].stop_reason}: {trajectories[0].error}"

                    watching = asyncio.create_task(self._tell(policy, lambda: self.progress.counted(done, total)))
                    try:
                        await play_set(
                            cfg, held_out, policy, done=self._done(held_out.name), admission=admission,
                            on_episode=on_episode,
                        )  # fmt: skip
                    finally:
                        watching.cancel()
                        self._seconds[held_out.name] += time.monotonic() - began
                self.stopped = admission.reason
                self.warnings += policy.notes
        finally:
            lines.sync()
            lines.close()

    async def _tell(self, policy: Policy, count: Callable[[], None]) -> None:
        """Show how far it is and what is wrong, also while no episode ends."""
        told: str | None = None
        while True:
            await asyncio.sleep(POLL_SECONDS)
            count()
            wrong = policy.trouble()
            trouble = f"a request got no answer and is sent again: {wrong}" if wrong else self._last_error
            if trouble and not told:  # one is enough while nothing else happens; the last one is told at the end
                self.progress.warn(trouble)
            told = trouble or told

    @property
    def folder(self) -> str:
        """The run folder as a person would type it."""
        return shown(self.run.path)

    def summary(self, model: str | None) -> Report:
        """The report of what has ended so far, of all starts."""
        return Report(
            self._summaries(),
            model=described(self.cfg, model),
            folder=str(self.run.path),
            warnings=self.warnings,
            stopped=self.stopped,
            last_error=self._last_error,
        )

    def _summaries(self) -> dict[str, EvalSummary]:
        found = {}
        for held_out in self.sets:
            name = held_out.name
            seconds = self._seconds[name] + self._earlier.get(name, 0.0)
            planned = len(self._planned[name])
            found[name] = summarize(name, held_out.split, self._ended[name], seconds, planned=planned)
        return found

    def report(self, model: str | None) -> int:
        """Write the summary, show the tables, return the exit code."""
        report = self.summary(model)
        report.write(self.run.path / SUMMARY)
        for part in report.tables():
            self.progress.log(part)
        self.progress.log(Text(f"every episode is in {shown(self.run.path / TRAJECTORIES)}"))
        shortcomings = report.shortcomings(self.cfg.fail_on_error)
        for line in shortcomings:
            self.progress.log(Text(line, style="bold red"))
        if shortcomings:
            self.progress.log(Text(f"incomplete: the same command with --output-dir {self.folder} goes on"))
        if self.cfg.json:
            sys.stdout.write(report.to_json() + "\n")
            sys.stdout.flush()
        return 1 if shortcomings else 0


def without_text(trajectory: Trajectory) -> Trajectory:
    """What the summary needs of an episode that is in the file: memory must not grow with every token."""
    return replace(trajectory, segments=[], messages=[])


def rewrite(file: Path, keep: Container[str]) -> None:
    """Leave the trajectories with these ids in a ``trajectories.jsonl``: the whole file is replaced, or nothing."""
    with atomic_file(file) as stream:
        for record in read_jsonl(file):
            if record["trajectory_id"] in keep:
                stream.write(json_line(record))


async def _until_sigterm(work: Coroutine[Any, Any, Any]) -> Any:
    with cancel_on_signals():
        return await work
