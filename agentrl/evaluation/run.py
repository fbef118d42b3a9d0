"""``agentrl eval``: held-out tasks with a model, on engines of its own or behind a server.

Needs no Ray and no Megatron, and nothing heavy at all when a server has the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.concurrency.together import together
from agentrl.config.schema import EvalConfig
from agentrl.config.serialize import run_folder_of
from agentrl.data.episodes import Episode, by_episode, is_error, is_whole
from agentrl.data.files import JsonLines, read_jsonl, write_jsonl
from agentrl.data.records import to_record
from agentrl.data.run_folder import RunDir
from agentrl.envs.registry import make_env
from agentrl.errors import ConfigError, DataError
from agentrl.evaluation.heldout import HeldOutSet, held_out_sets, rehearse_set
from agentrl.evaluation.metrics import summarize
from agentrl.evaluation.policy import Policy, described, model_folder, model_identity, open_policy, settled
from agentrl.evaluation.record import identity, refuse_other
from agentrl.evaluation.report import Report, warnings_before
from agentrl.evaluation.results import SUMMARY, TRAJECTORIES, read_episodes, read_summaries
from agentrl.jsonl import read_json
from agentrl.processes.signals import cancel_on_signals, write_log_to
from agentrl.processes.warden import Warden
from agentrl.progress import Progress, shown
from agentrl.rollout.options import episode_limits, eval_params, prepare_environments
from agentrl.types import Task, Trajectory, replace

DATE = "chat_template_date"
IDENTITY = "evaluation"
"""Key of ``run.json`` that holds what is evaluated."""

HOPELESS = 32
"""Infrastructure errors without a single scored episode after which no more are started."""

POLL_SECONDS = 1.0


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
        session = Session(cfg, sets, run, progress, model, warnings_before(cfg, sets))
        tasks = ", ".join(
            f"{s.name} {len(s.tasks)}" + ("" if s.available in (None, len(s.tasks)) else f" of {s.available}")
            for s in sets
        )
        about = [f"run folder  {run.path}", f"model       {described(cfg, model)}", f"tasks       {tasks}"]
        progress.log(Text("\n".join(about)))
        for warning in session.warnings:
            progress.log(Text(f"warning: {warning}", style="bold red"))
        if session.remaining():
            temporary = stack.enter_context(contextlib.ExitStack())
            temporary.enter_context(temporary.enter_context(Warden()).scratch())
            session.play()
        return session.end()


def _dated(cfg: EvalConfig) -> EvalConfig:
    """``cfg`` with the date that its chat template takes for today: as given, as in an earlier start, or the day's."""
    if cfg.chat_template_date is not None or cfg.base_url is not None:
        return cfg
    date = None
    if cfg.output_dir is not None:
        with contextlib.suppress(DataError):  # no folder yet, or none that is readable
            date = read_json(Path(cfg.output_dir) / "run.json").get(DATE)
    return cfg.replace(chat_template_date=date or datetime.date.today().isoformat())


def _open_folder(cfg: EvalConfig, what: dict[str, Any]) -> RunDir:
    """A new run folder, or the one of an earlier start of the same evaluation.
    Raises ConfigError: the folder holds a training run, or an evaluation of something else; the text says of what."""
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


@dataclass(frozen=True)
class Planned:
    """An episode to be played: sample ``number`` of ``task``. Its ids are the same in every start of an evaluation."""

    task: Task
    group_id: str
    number: int

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}-{self.number:03d}"


def plan(held_out: HeldOutSet, samples: int) -> list[Planned]:
    """All episodes of a set, first each task once, so that an evaluation cut short has seen as many tasks as it can."""
    return [
        Planned(task, f"{held_out.name}-{index:06d}", number)
        for number in range(samples)
        for index, task in enumerate(held_out.tasks)
    ]


@dataclass
class Session:
    """One start of an evaluation: what is there of earlier ones, and what is added."""

    cfg: EvalConfig
    sets: Sequence[HeldOutSet]
    run: RunDir
    progress: Progress
    model: str | None
    """HF folder; None: a server has it."""
    warnings: list[str] = field(default_factory=list)
    stopped: str | None = None
    """Why no further episode starts."""

    def __post_init__(self) -> None:
        self._seconds = {s.name: 0.0 for s in self.sets}
        for name, summary in read_summaries(self.run.path / SUMMARY).items():
            self._seconds[name] = summary.get("seconds") or 0.0
        self._ended = self._kept()
        self._last_error: str | None = None
        self._planned = {s.name: plan(s, self.cfg.n_samples_per_eval_prompt) for s in self.sets}
        self._deadline: float | None = None
        self._errors, self._scored = 0, False

    def _kept(self) -> dict[str, list[Trajectory]]:
        """Set -> episodes of earlier starts; those that failed for reasons of infrastructure are played again.

        So are those of which a kill left only some agents. The file is rewritten without either, in one step.
        """
        file = self.run.path / TRAJECTORIES
        kept: dict[str, list[Trajectory]] = {s.name: [] for s in self.sets}
        lost = False
        for name, trajectories in read_episodes(file, segments=False).items() if file.is_file() else ():
            for episode in by_episode(trajectories):
                if is_error(episode) or not is_whole(episode):
                    lost = True
                elif name in kept:
                    kept[name] += map(_without_text, episode)
        if lost:
            ids = {t.trajectory_id for trajectories in kept.values() for t in trajectories}
            write_jsonl(file, (record for record in read_jsonl(file) if record["trajectory_id"] in ids))
        return kept

    def _open(self, name: str) -> list[Planned]:
        """Episodes of a set that are still to be played."""
        done = {t.episode_id for t in self._ended[name]}
        return [p for p in self._planned[name] if p.episode_id not in done]

    def remaining(self) -> int:
        """Episodes that are still to be played, of all sets."""
        return sum(len(self._open(s.name)) for s in self.sets)

    def play(self) -> None:
        """Play what remains. Whatever happens, what was played is in the folder, with a summary.
        Raises AgentRLError: engines did not start, or cannot answer any more.
        Raises KeyboardInterrupt: after the same cleaning up."""
        total, before = sum(map(len, self._planned.values())), self.remaining()
        if before < total:
            self.progress.log(Text(f"{total - before} episodes are there already, {before} remain"))
        self.stopped = "it was interrupted"
        for held_out in self.sets:  # without a model, so that what is wrong with its code is said at once
            if self._open(held_out.name):
                rehearse_set(self.cfg, held_out)
        try:
            asyncio.run(self._play())
        except BaseException:
            if self.remaining() < before:
                self.report().write(self.run.path / SUMMARY)
                self.progress.log(Text(f"stopped early; the same command with --output-dir {self.folder} goes on"))
            raise

    async def _play(self) -> None:
        cfg = self.cfg
        self._deadline = None if cfg.eval_time_limit is None else time.monotonic() + cfg.eval_time_limit
        acts_in = [(held_out.spec, held_out.kwargs) for held_out in self.sets]
        self.progress.stage("preparing the tools")
        await asyncio.to_thread(prepare_environments, cfg, acts_in)
        self.progress.stage("starting engines" if self.model is not None else "connecting to the server")
        reason: str | None = None
        with cancel_on_signals(), contextlib.closing(JsonLines(self.run.path / TRAJECTORIES)) as lines:
            async with open_policy(cfg, self.model, logs=self.run.logs, environments=acts_in) as policy:
                for note in policy.about_template:
                    self.progress.log(Text(note))
                for held_out in self.sets:
                    self.progress.stage(f"evaluating {held_out.name} ({held_out.split})")
                    began = time.monotonic()
                    try:
                        async with self._telling(policy):
                            reason = await self._play_set(held_out, policy, lines, reason)
                    finally:
                        self._seconds[held_out.name] += time.monotonic() - began
                        lines.sync()
                self.stopped = reason
                self.warnings += policy.notes

    async def _play_set(self, held_out: HeldOutSet, policy: Policy, lines: JsonLines, reason: str | None) -> str | None:
        """Play the open episodes of a set; those that run when no more may start are played to their end. Returns why
        no further one starts; None where there is no reason.
        Raises EngineError: no engine is left.
        Raises ConfigError: what is asked for cannot work at all (a key that the server refuses, say)."""
        from agentrl.rollout.worker import EpisodeRunner, unless_broken

        cfg = self.cfg
        runner = EpisodeRunner(
            lambda: make_env(held_out.spec, held_out.kwargs, tool_timeout=cfg.tool_timeout, sandbox=cfg.sandbox),
            policy.client,
            policy.chat,
            eval_params(cfg),
            episode_limits(cfg.held_out),
            cfg.rollout_concurrency,
            max_retries=cfg.max_retries,
            generate=cfg.custom_generate_function_path,
        )
        pending = iter(self._open(held_out.name))

        async def player() -> None:
            nonlocal reason
            for planned in pending:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    reason = reason or "the time of --eval-time-limit was up"
                if reason is not None:
                    return
                group = await runner.run_group(planned.task, 1, planned.group_id, indices=(planned.number,))
                lines.append(*(to_record(t, set_name=held_out.name) for t in group.trajectories))
                hopeless = self._note(held_out.name, group.trajectories)
                reason = reason or hopeless

        players = together(player() for _ in range(cfg.rollout_concurrency))
        try:
            await unless_broken(asyncio.create_task(players), policy.broken)
        finally:
            await runner.close()
        return reason

    def _note(self, name: str, episode: Episode) -> str | None:
        """Take note of how an episode ended; returns why none should follow, where nothing succeeds."""
        self._ended[name] += map(_without_text, episode)
        if not is_error(episode):
            self._scored = True
            return None
        self._errors += 1
        self._last_error = f"{episode[0].stop_reason}: {episode[0].error}"
        if self._scored or self._errors < HOPELESS:
            return None
        return f"the first {self._errors} episodes ended for reasons of infrastructure"

    @contextlib.asynccontextmanager
    async def _telling(self, policy: Policy) -> AsyncIterator[None]:
        """Show how far it is and what is wrong, also while no episode ends."""

        async def tell() -> None:
            told: str | None = None
            total = sum(map(len, self._planned.values()))
            while True:
                await asyncio.sleep(POLL_SECONDS)
                self.progress.counted(total - self.remaining(), total)
                wrong = policy.trouble()
                trouble = f"a request got no answer and is sent again: {wrong}" if wrong else self._last_error
                if trouble and not told:  # one is enough while nothing else happens; the last one is told at the end
                    self.progress.warn(trouble)
                told = trouble or told

        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()

    @property
    def folder(self) -> str:
        """The run folder as a person would type it."""
        return shown(self.run.path)

    def report(self) -> Report:
        """The report of what has ended so far, of all starts."""
        summaries = {
            s.name: summarize(
                s.name, s.split, self._ended[s.name], self._seconds[s.name], planned=len(self._planned[s.name])
            )
            for s in self.sets
        }
        return Report(
            summaries,
            model=described(self.cfg, self.model),
            folder=str(self.run.path),
            warnings=self.warnings,
            stopped=self.stopped,
            last_error=self._last_error,
        )

    def end(self) -> int:
        """Write the summary, show the tables, return the exit code."""
        report = self.report()
        report.tell(self.run.path / SUMMARY, self.progress)
        self.progress.log(Text(f"every episode is in {shown(self.run.path / TRAJECTORIES)}"))
        shortcomings = report.shortcomings(self.cfg.fail_on_error)
        for line in shortcomings:
            self.progress.log(Text(line, style="bold red"))
        if shortcomings:
            self.progress.log(Text(f"incomplete: the same command with --output-dir {self.folder} goes on"))
        if self.cfg.json:
            report.print_json()
        return 1 if shortcomings else 0


def _without_text(trajectory: Trajectory) -> Trajectory:
    """What the summary needs of an episode that is in the file: memory must not grow with every token."""
    return replace(trajectory, segments=[], messages=[])
