"""Runs from Python: :func:`train` and :func:`evaluate`, for notebooks and scripts, and :class:`Run` to look at one.

The options are those of the command line by the same names. A run is the same command in a process of its own: an
interrupt ends it as Ctrl-C does, nothing of it stays in the notebook, and code defined there goes with it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from agentrl.data.files import read_jsonl
from agentrl.data.run_folder import RunDir
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, DataError, LostError, StorageError
from agentrl.processes.tree import die_with_parent

if TYPE_CHECKING:
    from agentrl.config.layers import AnyConfig
    from agentrl.evaluation.results import EvalResult
    from agentrl.types import Trajectory

LEAVING = 60.0
"""Seconds that a run has to end its processes after an interrupt."""
SESSION_CODE = "session_code"
"""Folder beside the run folders for classes and functions that were defined in a notebook or script."""


class Run:
    """A training run, read from its folder. Everything is read when asked for, so that a live run shows its progress.

    Args:
        path: run folder of ``agentrl train``.

    Raises:
        DataError: the folder is no training run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise DataError(f"{self.path} is no run folder: it has no config.json.")

    @property
    def config(self) -> dict[str, Any]:
        """Every option, resolved."""
        return cast(dict[str, Any], json.loads((self.path / "config.json").read_text(encoding="utf-8")))

    @property
    def history(self) -> list[dict[str, Any]]:
        """A mapping of metrics for each step, in order; ``pandas.DataFrame(run.history)`` takes it."""
        return [line for line in self._lines("metrics.jsonl") if not any(key.startswith("eval/") for key in line)]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A summary for each held-out evaluation: ``step``, and ``sets`` by name."""
        return self._lines("evaluations.jsonl")

    def trajectories(self, name: str = "train", *, step: int | None = None, segments: bool = True) -> list[Trajectory]:
        """Stored episodes.

        Args:
            name: ``train``, or ``eval-`` and the name of a held-out set.
            step: of one step only.
            segments: False leaves tokens on disk.
        """
        from agentrl.data.store import TrajectoryStore

        store = TrajectoryStore(self.path / "trajectories", read_only=True)
        return list(store.read(name, step=step, segments=segments))

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the newest complete checkpoint."""
        from agentrl.data.checkpoint import CheckpointStore

        store = CheckpointStore.of_run(self.path)
        return store.newest().path if store.newest_step() else None

    @property
    def curve(self) -> Path:
        """The picture of the learning curve."""
        return self.path / "reward.png"

    def __repr__(self) -> str:
        scores = [
            f"{name} {100 * summary['success']['mean']:.1f} % at step {line['step']}"
            for line in self.evaluations[-1:]
            for name, summary in line["sets"].items()
            if summary.get("success", {}).get("n")
        ]
        return f"Run({str(self.path)!r}: {', '.join([f'{len(self.history)} steps', *scores])})"

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        return list(read_jsonl(file)) if file.is_file() else []


def train(*, progress: bool = True, **options: Any) -> Run:
    """Trains as ``agentrl train`` does, and returns the run.

    Args:
        progress: print what the command prints, line by line.
        **options: options of ``agentrl train`` with underscores (``env="search"``, ``num_rollout=20``,
            ``env_arg={"hops": 2}``); ``docs/configuration.md`` lists them. Where the name of a class or function is
            expected (``env``, ``custom_rm_path``), the object itself will do, also one defined in this notebook.

    Raises:
        ConfigError: an option is wrong; all that are wrong are named. Nothing was started.
        AgentRLError: the run failed, with the words of the command; its folder is kept.
        KeyboardInterrupt: after the run has ended its processes.
    """
    from agentrl.config.schema import Config

    if options.get("dry_run"):
        raise ConfigError("dry_run makes no run that could be returned: use the command, agentrl train --dry-run.")
    return Run(run_command("train", Config, options, progress))


def evaluate(*, progress: bool = True, **options: Any) -> EvalResult:
    """Evaluates as ``agentrl eval`` does, and returns episodes, summaries and record.

    Args:
        progress: print what the command prints, line by line.
        **options: options of ``agentrl eval``, as for :func:`train`; ``run`` also takes a :class:`Run`.

    Raises:
        ConfigError: an option is wrong; all that are wrong are named. Nothing was started.
        AgentRLError: not every episode could be played and scored; the same call with its ``output_dir`` goes on.
        KeyboardInterrupt: after the evaluation has ended its processes.
    """
    from agentrl.config.schema import EvalConfig
    from agentrl.evaluation.results import load

    return load(run_command("eval", EvalConfig, options, progress))


def run_command(command: str, config_class: type[AnyConfig], options: Mapping[str, Any], progress: bool) -> Path:
    """Runs a command to its end; returns its run folder."""
    from agentrl.config.layers import resolve

    base = Path(options["output_dir"]).parent if options.get("output_dir") else Path("runs")
    values = {name: plain(value, base / SESSION_CODE) for name, value in options.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "options.json"
        file.write_text(json.dumps(values), encoding="utf-8")
        config = resolve(config_class, ["--config", str(file)]).config
        reserved = None if config.output_dir else RunDir.reserve(config).path
        path = reserved or Path(str(config.output_dir)).absolute()
        try:
            words: list[str] = [command, "--config", str(file), "--output-dir", str(path)]
            code, last = _watched([sys.executable, "-m", "agentrl", *words], progress)
        finally:
            if reserved is not None and not (reserved / "config.json").exists():
                shutil.rmtree(reserved, ignore_errors=True)  # the command refused to start
    if code:
        raise _ERRORS.get(code, AgentRLError)(last or f"`agentrl {command}` ended with exit code {code}.")
    return path


_ERRORS = {error.exit_code: error for error in (ConfigError, CheckpointError, StorageError, LostError)}


def _watched(words: list[str], progress: bool) -> tuple[int, str]:
    """Runs a command to its end; returns its exit code and what it said of an error."""
    paths = [entry or os.getcwd() for entry in sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    tail: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,  # Ctrl-C reaches it once, from here
        preexec_fn=functools.partial(die_with_parent, signum=signal.SIGTERM) if sys.platform == "linux" else None,
    ) as process:
        try:
            for line in process.stdout or ():
                tail.append(line)
                if progress:
                    print(line, end="", flush=True)
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(LEAVING)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    text = "".join(tail)
    return process.returncode, text.rpartition("error: ")[2].strip() if "error: " in text else text.strip()


def plain(value: Any, folder: Path) -> Any:
    """An option's value as a file of options holds it; code of this session is written to ``folder``."""
    if isinstance(value, Run):
        return str(value.path)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, folder) for item in value]
    return spec(value, folder) if callable(value) else value


def spec(value: Callable[..., Any], folder: Path) -> str:
    """The name by which other processes find a class or function; code of this session is written to ``folder``."""
    module, name = value.__module__, value.__qualname__
    if module != "__main__" and "<locals>" not in name:
        return f"{module}:{name}"
    stream = io.BytesIO()
    _pickler()(stream).dump(value)
    code = base64.b64encode(stream.getvalue()).decode()
    name = value.__name__
    file = folder / f"{name}_{hashlib.sha256(code.encode()).hexdigest()[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'"""{name}, defined in a Python session and written here by agentrl for the processes of its runs."""\n\n'
        f'import base64\n\nimport cloudpickle\n\n{name} = cloudpickle.loads(base64.b64decode("{code}"))\n'
        f'{name}.__module__ = __name__\n',
        encoding="utf-8",
    )
    return f"{file.absolute()}:{name}"


def _pickler() -> Callable[[io.BytesIO], Any]:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Entry points that were completed around an author's code are completed anew where the class is loaded."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FunctionType) and (made := getattr(obj, "_agentrl_remade", None)) is not None:
                return made
            return super().reducer_override(obj)

    return Pickler
