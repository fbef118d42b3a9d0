"""The folder of one run: everything it writes, and what a later run, page or notebook needs to read it.

config.json      every option, resolved; `agentrl train --load RUN` starts from it
run.json         when and by which versions the run was started
metrics.jsonl    one line a step (training) and one an evaluation
tensorboard/     the same scalars
trajectories/    every episode, see :mod:`agentrl.data.store`
checkpoints/     model, optimizer, data position
logs/            one file a process
reward.png       the learning curve
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.data.files import JsonLines, atomic_file, finite, read_jsonl, remove_partials, storage_errors, write_text
from agentrl.data.store import TrajectoryStore
from agentrl.data.tasks import env_label
from agentrl.data.tracking import TensorBoard, Tracker, WandB, plot_reward
from agentrl.errors import ConfigError, StorageError
from agentrl.versions import git_state, installed

REWARD = "rollout/reward"


class RunDir:
    """A run folder, held by one process at a time. Use as a context manager, or call :meth:`close`.

    Make one with :meth:`create`, or :meth:`resume` to go on.
    """

    def __init__(self, path: Path | str, config: Any):
        """Take hold of an existing folder. Raises StorageError when another process has it."""
        self.path = Path(path)
        self.config = config
        self.example_shown = False
        self._lock = self._acquire()
        with storage_errors(self.logs):
            self.logs.mkdir(exist_ok=True)
        remove_partials(self.path)
        self._metrics: JsonLines | None = None
        self._trackers: list[Tracker] = []

    # -- making and opening --------------------------------------------------------------------

    @classmethod
    def create(cls, config: Any, *, base: Path | str = "runs") -> RunDir:
        """A new run folder: ``config.output_dir``, or ``<base>/<env>-<date>-<n>``.

        Raises:
            ConfigError: The folder holds a run already.
            StorageError: It cannot be made or written.
        """
        if config.output_dir is not None:
            path = Path(config.output_dir).absolute()
            if (path / "config.json").exists() or (path / "trajectories.jsonl").exists():
                raise ConfigError(
                    f"--output-dir {config.output_dir} holds a run already. Continue it with --load "
                    f"{config.output_dir}, or choose another folder."
                )
            with storage_errors(path):
                path.mkdir(parents=True, exist_ok=True)
        else:
            path = _new_folder(Path(base).absolute(), config)
        run = cls(path, config.replace(output_dir=str(path)))
        run._write_description()
        run._open_trackers(first_step=None)
        return run

    @classmethod
    def resume(cls, config: Any, *, step: int) -> RunDir:
        """The run folder ``config.output_dir``, rewound to the checkpoint after ``step`` rollouts.

        What was logged and stored after it is removed: it will be done again. With a new, empty
        ``--output-dir`` the run goes on there and the old folder stays as it is.

        Raises:
            StorageError: It cannot be written, or another process is using it.
        """
        if config.output_dir is None or not Path(config.output_dir, "config.json").is_file():
            return cls.create(config)
        run = cls(Path(config.output_dir).absolute(), config)
        run._rewind(step)
        run._write_description()
        run._open_trackers(first_step=step)
        return run

    @classmethod
    def reopen(cls, config: Any) -> RunDir | None:
        """The folder ``config.output_dir`` if it holds a run already, as it is; None when it does not.

        Raises:
            StorageError: Another process is using it.
        """
        path = Path(config.output_dir).absolute() if config.output_dir is not None else None
        if path is None or not (path / "config.json").is_file():
            return None
        return cls(path, config.replace(output_dir=str(path)))

    def start_again(self) -> None:
        """Note another start, by a run that was made with :meth:`reopen`."""
        self._write_description()

    def describe(self, **facts: Any) -> None:
        """Set keys of ``run.json`` beside ``starts``."""
        write_text(self.path / "run.json", json.dumps({**self.description(), **facts}, indent=2) + "\n")

    def description(self) -> dict[str, Any]:
        """``run.json``; empty when it is not there or damaged."""
        try:
            values = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _acquire(self) -> Any:
        with storage_errors(self.path):
            lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StorageError(
                f"{self.path}: another process is writing this run. End it first, or choose another --output-dir."
            ) from None
        return lock

    def _write_description(self) -> None:
        write_text(self.path / "config.json", json.dumps(self.config.to_dict(), indent=2, allow_nan=False) + "\n")
        earlier = self.description().get("starts", [])
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
        self.describe(starts=[*earlier, start])

    def _open_trackers(self, first_step: int | None) -> None:
        if getattr(self.config, "tensorboard", False):
            self._trackers.append(TensorBoard(self.tensorboard_dir, first_step=first_step))
        if getattr(self.config, "use_wandb", False):
            self._trackers.append(
                WandB(self.path, project=self.config.wandb_project, name=self.path.name, config=self.config.to_dict())
            )

    # -- places --------------------------------------------------------------------------------

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    @property
    def tensorboard_dir(self) -> Path:
        """Folder of the TensorBoard files."""
        return self.path / "tensorboard"

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
        """Append one line to ``metrics.jsonl`` and hand the scalars to TensorBoard and wandb.

        Args:
            step: Rollouts done.
            metrics: Name -> number. NaN and infinities are written as null, and not handed on.
        """
        values = {name: float(value) for name, value in metrics.items()}
        if self._metrics is None:
            self._metrics = JsonLines(self.path / "metrics.jsonl")
        self._metrics.append({"step": int(step), "time": time.time(), **values})
        numbers = {name: value for name, value in values.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(int(step), numbers)

    def log_evaluation(self, step: int, sets: Mapping[str, Any]) -> None:
        """Append one line to ``evaluations.jsonl``: the whole summary of each held-out set after ``step`` rollouts."""
        lines = JsonLines(self.path / "evaluations.jsonl")
        try:
            lines.append({"step": int(step), "sets": dict(sets)})
        finally:
            lines.close()

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """The lines of ``evaluations.jsonl``, oldest first; nothing when there is none."""
        file = self.path / "evaluations.jsonl"
        return read_jsonl(file) if file.is_file() else iter(())

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; nothing when there is none."""
        file = self.path / "metrics.jsonl"
        return read_jsonl(file) if file.is_file() else iter(())

    def plot_reward(self) -> Path:
        """Draw ``reward.png`` from the metrics; returns its path."""
        rewards, held_out = [], {}
        for line in self.metrics():
            if line.get(REWARD) is not None:
                rewards.append((line["step"], line[REWARD]))
            for name, value in line.items():
                if name.startswith("eval/") and name.endswith("/success") and value is not None:
                    held_out.setdefault(name.split("/")[1], []).append((line["step"], value))
        path = self.path / "reward.png"
        plot_reward(path, rewards, held_out, title=self.path.name)
        return path

    def _rewind(self, step: int) -> None:
        if self._metrics is not None:
            self._metrics.close()
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            file = self.path / name
            kept = [line for line in read_jsonl(file) if line["step"] <= step] if file.is_file() else []
            with atomic_file(file) as stream:
                for line in kept:
                    stream.write((json.dumps(finite(line)) + "\n").encode("ascii"))
        self._metrics = None
        self.store.rewind(step)

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush everything and let the folder go. May be called twice."""
        if self._lock.closed:
            return
        try:
            if self._metrics is not None:
                self._metrics.sync()
                self._metrics.close()
            for tracker in self._trackers:
                tracker.close()
        finally:
            self._lock.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _new_folder(base: Path, config: Any) -> Path:
    """Make ``<base>/<env>-<date>-<n>`` with the first free n."""
    # Without an environment or task file of its own, an evaluation is of held-out files alone.
    environments = (config.env,) if isinstance(config.env, str) else config.env
    if any(environments):
        label = "-".join(env_label(spec) for spec in environments)
    else:
        label = env_label(Path(config.prompt_data or config.eval_prompt_data[0][1]).stem)
    kind = "" if hasattr(config, "num_rollout") else "eval-"
    stem = f"{kind}{label}-{time.strftime('%Y%m%d')}"
    with storage_errors(base):
        base.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = base / f"{stem}-{number}"
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
            else:
                return path
