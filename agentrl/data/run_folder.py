"""The folder of one run: everything it writes, and what a later run, page or notebook needs to read it.

config.json      every option, resolved; `agentrl train --load RUN` starts from it
run.json         when and by which versions the run was started, where it was forked from, how it ended
metrics.jsonl    one line a step (training) and one an evaluation
evaluations.jsonl  the whole summary of each evaluation; its lines in metrics.jsonl follow from it
tensorboard/     the same scalars
trajectories/    every episode, see :mod:`agentrl.data.store`
checkpoints/     model, optimizer, data position
logs/            one file a process
reward.png       the learning curve
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

from agentrl.data.files import (
    JsonLines,
    lock_file,
    read_jsonl,
    refuse_folders,
    remove_partials,
    storage_errors,
    write_json,
    write_jsonl,
)
from agentrl.data.store import TrajectoryStore
from agentrl.data.tracking import TensorBoard, Tracker, WandB, plot_reward
from agentrl.errors import ConfigError, DataError
from agentrl.jsonl import read_json
from agentrl.tasks.source import env_label
from agentrl.versions import git_state, installed

if TYPE_CHECKING:
    from agentrl.config.schema import Config, EvalConfig

AnyConfig = TypeVar("AnyConfig", "Config", "EvalConfig")

PRIVATE = 0o700
"""Mode of a run folder: it holds what users and models said, and weights."""
REWARD = "rollout/reward"
SCALARS = ("turns", "tool_calls", "tokens", "truncation_rate", "errors", "seconds")


def flatten_summary(name: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """Scalars of a held-out summary as ``eval/<set>/<metric>``."""
    values = {k: summary[k] for k in SCALARS}
    for key in ("success", "reward"):
        estimate = summary[key]
        values |= {key: estimate["mean"], f"{key}_low": estimate["low"], f"{key}_high": estimate["high"]}
    return {f"eval/{name}/{key}": math.nan if value is None else float(value) for key, value in values.items()}


def scalars_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """What ``metrics.jsonl`` says of a line of ``evaluations.jsonl``."""
    parts = (flatten_summary(name, summary) for name, summary in evaluation["sets"].items())
    return {name: value for part in parts for name, value in part.items()}


class RunDir(Generic[AnyConfig]):
    """A run folder, held by one process at a time unless it is only looked at. Use as a context manager, or call
    :meth:`close`. Make one with :meth:`create`, or :meth:`resume` and :meth:`go_on` to go on. ``mended``: what was
    found damaged, and what became of it, for a person."""

    def __init__(self, path: Path | str, config: AnyConfig, *, hold: bool = True):
        """Take hold of an existing folder. Raises StorageError when another process has it.

        Without ``hold`` it is read, whoever has it, and nothing in it is touched.
        """
        self.path = Path(path)
        self.config: AnyConfig = config
        self.mended: list[str] = []
        self._metrics: JsonLines | None = None
        self._trackers: list[Tracker] = []
        self._lock: IO[str] | None = None
        if not hold:
            return
        self._lock = lock_file(
            self.path / ".lock",
            f"{self.path}: another process is writing this run. End it first, or choose another --output-dir.",
        )
        with storage_errors(self.logs):
            self.logs.mkdir(exist_ok=True)
            remove_partials(self.path)

    # -- making and opening --------------------------------------------------------------------

    @classmethod
    def create(cls, config: AnyConfig, *, base: Path | str = "runs") -> RunDir[AnyConfig]:
        """A new run folder: ``config.output_dir``, or ``<base>/<env>-<date>-<n>``.
        Raises ConfigError: the folder holds a run already.
        Raises StorageError: it cannot be made or written."""
        run = cls.reserve(config, base=base)
        run.note_start()
        run.open_trackers()
        return run

    @classmethod
    def reserve(cls, config: AnyConfig, *, base: Path | str = "runs") -> RunDir[AnyConfig]:
        """As :meth:`create`, but the folder is no run yet: :meth:`note_start` makes it one."""
        path = new_folder(config, base)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    path.mkdir(mode=PRIVATE, exist_ok=config.output_dir is not None)
                    break
                except FileExistsError:  # another run took this number just now
                    if config.output_dir is not None:  # a file
                        raise
                    path = new_folder(config, base)
        return cls(path, config.replace(output_dir=str(path)))

    @classmethod
    def resume(cls, config: AnyConfig, *, hold: bool = True) -> RunDir[AnyConfig]:
        """The run folder ``config.output_dir``, as it is. Nothing is changed before :meth:`go_on`.
        Raises StorageError: it cannot be written, or another process is using it."""
        path = Path(str(config.output_dir)).absolute()
        refuse_folders(*(path / name for name in ("config.json", "run.json", "metrics.jsonl", "evaluations.jsonl")))
        return cls(path, config, hold=hold)

    def go_on(self, step: int) -> None:
        """Go on after ``step`` rollouts: what was logged and stored after them is removed, for it will be done again.

        Whatever a kill left half done is completed, so the checkpoint must be settled before
        (:meth:`~agentrl.data.checkpoint.CheckpointStore.go_on_from`): the next start then comes here again.
        """
        evaluations = [line for line in self.evaluations(mended=self.mended) if line["step"] <= step]
        done = {line["step"] for line in evaluations}
        metrics = [
            line
            for line in self.metrics(mended=self.mended)
            # An evaluation of this very step that is not on record is played again.
            if line["step"] < step or (line["step"] == step and (not _of_evaluation(line) or step in done))
        ]
        write_jsonl(self.path / "evaluations.jsonl", evaluations)
        write_jsonl(self.path / "metrics.jsonl", metrics)
        self.store.rewind(step)
        trained = {line["step"] for line in metrics if not _of_evaluation(line)}
        forked = self.description().get("forked_from")
        first = forked.get("step", 0) if isinstance(forked, dict) else 0
        if missing := [n for n in range(first + 1, step + 1) if n not in trained]:
            self.mended.append(f"metrics.jsonl has no line of step {', '.join(map(str, missing))}")
        self.open_trackers(first_step=step)
        logged = {line["step"] for line in metrics if _of_evaluation(line)}
        for line in evaluations:
            if line["step"] not in logged:
                self.log_metrics(int(step), scalars_of(line))

    @classmethod
    def reopen(cls, config: AnyConfig) -> RunDir[AnyConfig] | None:
        """The folder ``config.output_dir`` if it holds a run already, as it is; None when it does not.
        Raises StorageError: another process is using it."""
        path = Path(config.output_dir or "").absolute()
        if config.output_dir is None or not (path / "config.json").is_file():
            return None
        return cls(path, config.replace(output_dir=str(path)))

    def describe(self, **facts: Any) -> None:
        """Set keys of ``run.json`` beside ``starts``."""
        write_json(self.path / "run.json", {**self.description(), **facts})

    def description(self) -> dict[str, Any]:
        """``run.json``; empty when it is not there or damaged."""
        try:
            return read_json(self.path / "run.json")
        except DataError:
            return {}

    def note_start(self, **facts: Any) -> None:
        """Write ``config.json``, and into ``run.json`` this start and ``facts``."""
        again = (self.path / "config.json").is_file()
        write_json(self.path / "config.json", self.config.to_dict())
        noted = self.description().get("starts")
        if again and not isinstance(noted, list):
            self.mended.append("run.json was missing or damaged: it is begun anew")
        earlier: list[Any] = noted if isinstance(noted, list) else []
        start = {
            "time": time.time(),
            "argv": sys.argv[1:],
            "directory": os.getcwd(),
            "host": platform.node(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": installed(),
            "git": git_state(os.getcwd()),
            "agentrl_git": git_state(Path(__file__).parent),
        }
        self.describe(starts=[*earlier, start], **facts)

    def open_trackers(self, first_step: int | None = None) -> None:
        """Begin with TensorBoard and wandb; what they hold of steps after ``first_step`` is void."""
        if getattr(self.config, "tensorboard", False):  # an evaluation has neither
            self._trackers.append(TensorBoard(self.path / "tensorboard", first_step=first_step))
        if getattr(self.config, "use_wandb", False):
            values = self.config.to_dict()
            self._trackers.append(WandB(self.path, project=values["wandb_project"], name=self.path.name, config=values))

    # -- places --------------------------------------------------------------------------------

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints: ``--save``, or in the run folder."""
        save = getattr(self.config, "save", None)
        return Path(save).absolute() if save else self.path / "checkpoints"

    def log_path(self, process: str) -> Path:
        """The log file of a process (``engine-0``, ``trainer-1``, ``driver``)."""
        return self.logs / f"{process}.log"

    @functools.cached_property
    def store(self) -> TrajectoryStore:
        """The trajectories of training; the folder is made at the first use."""
        return TrajectoryStore(self.path / "trajectories")

    # -- metrics -------------------------------------------------------------------------------

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to ``metrics.jsonl``, after ``step`` rollouts, and hand the scalars to TensorBoard and wandb.
        NaN and infinities are written as null, and not handed on."""
        values = {name: float(value) for name, value in metrics.items()}
        if self._metrics is None:
            self._metrics = JsonLines(self.path / "metrics.jsonl")
        self._metrics.append({"step": int(step), "time": time.time(), **values})
        self._metrics.sync()
        numbers = {name: value for name, value in values.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(int(step), numbers)

    def log_evaluation(self, step: int, sets: Mapping[str, Any]) -> None:
        """Append the whole summary of each held-out set after ``step`` rollouts to ``evaluations.jsonl``.

        Its scalars follow in ``metrics.jsonl``, at the next start where a kill comes between.
        """
        line: dict[str, Any] = {"step": int(step), "sets": dict(sets)}
        with contextlib.closing(JsonLines(self.path / "evaluations.jsonl")) as lines:
            lines.append(line)
            lines.sync()
        self.log_metrics(line["step"], scalars_of(line))

    def evaluations(self, *, mended: list[str] | None = None) -> Iterator[dict[str, Any]]:
        """The lines of ``evaluations.jsonl``, oldest first. Damaged ones are passed over, and named in ``mended``."""
        return self._lines("evaluations.jsonl", scalars_of, mended)

    def metrics(self, *, mended: list[str] | None = None) -> Iterator[dict[str, Any]]:
        """The lines of ``metrics.jsonl``. Damaged ones are passed over, and named in ``mended``."""
        return self._lines("metrics.jsonl", lambda line: None, mended)

    def _lines(self, name: str, check: Callable[[Any], Any], mended: list[str] | None) -> Iterator[dict[str, Any]]:
        damaged: list[str] = []
        file = self.path / name
        for line in read_jsonl(file, damaged=damaged) if file.is_file() else ():
            try:
                if type(line["step"]) is not int:
                    raise TypeError(f"step is {line['step']!r}")
                check(line)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                damaged.append(f"{name}: no such line as expected: {error!r}")
            else:
                yield line
        if mended is not None:
            mended += [f"{problem}; the line is passed over" for problem in damaged]

    def plot_reward(self) -> Path:
        """Draw ``reward.png`` from the metrics; returns its path."""
        rewards: list[tuple[int, float]] = []
        held_out: dict[str, list[tuple[int, float]]] = {}
        for line in self.metrics():
            for name, value in line.items():
                if name == REWARD and value is not None:
                    rewards.append((line["step"], value))
                elif name.startswith("eval/") and name.endswith("/success") and value is not None:
                    held_out.setdefault(name.split("/")[1], []).append((line["step"], value))
        path = self.path / "reward.png"
        plot_reward(path, rewards, held_out, title=self.path.name)
        return path

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush everything and let the folder go. May be called twice."""
        if self._lock is None or self._lock.closed:
            return
        try:
            if self._metrics is not None:
                self._metrics.sync()
                self._metrics.close()
            for tracker in self._trackers:
                tracker.close()
        finally:
            self._lock.close()

    def __enter__(self) -> RunDir[AnyConfig]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _of_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in line)


def new_folder(config: Config | EvalConfig, base: Path | str = "runs") -> Path:
    """The folder that a new run makes: ``config.output_dir``, or ``<base>/<env>-<date>-<n>`` with the first free n.
    Raises ConfigError: ``config.output_dir`` holds a run already."""
    if config.output_dir is not None:
        path = Path(config.output_dir).absolute()
        if (path / "config.json").exists() or (path / "trajectories.jsonl").exists():
            raise ConfigError(
                f"--output-dir {config.output_dir} holds a run already. Continue it with --load "
                f"{config.output_dir}, or choose another folder."
            )
        return path
    # Without an environment or task file of its own, an evaluation is of held-out files alone.
    environments = (config.env,) if isinstance(config.env, str) else config.env
    label = "-".join(env_label(spec) for spec in environments if spec)
    stored = ("train_data", "sft_from", "load_debug_rollout_data")
    learned = next((given for name in stored if (given := getattr(config, name, None))), None)
    label = label or env_label(Path(learned or config.prompt_data or config.eval_prompt_data[0][1]).stem)
    kind = "" if hasattr(config, "num_rollout") else "eval-"
    names = (f"{kind}{label}-{time.strftime('%Y%m%d')}-{number}" for number in itertools.count(1))
    return next(path for name in names if not os.path.lexists(path := Path(base).absolute() / name))
