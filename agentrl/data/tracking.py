"""Where scalars of a run go besides ``metrics.jsonl``: TensorBoard files, Weights & Biases, a picture of the reward."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.data.files import atomic_file, storage_errors
from agentrl.errors import ConfigError


class Tracker(Protocol):
    """A sink of scalars."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the scalars of one step."""

    def close(self) -> None:
        """Flush and let go."""


class TensorBoard:
    """TensorBoard event files, by tensorboard's own writer (neither torch nor TensorFlow). Each opening adds one; steps
    after ``first_step`` that earlier files hold are void: TensorBoard hides them."""

    def __init__(self, folder: Path, *, first_step: int | None = None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        with storage_errors(folder):
            self._writer = EventFileWriter(str(folder), flush_secs=30)
        if first_step is not None:
            start = Event(wall_time=time.time(), step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._writer.add_event(start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and flush the scalars of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandB:
    """Weights & Biases, when asked for. Its key comes from its own environment variable or login."""

    def __init__(self, folder: Path, *, project: str, name: str, config: dict[str, Any]):
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                "--use-wandb needs the package wandb, which is not installed: pip install wandb, or leave the flag out."
            ) from None
        self._run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(folder), config=config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the scalars of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


def plot_reward(
    path: Path, rewards: Sequence[tuple[int, float]], held_out: Mapping[str, Sequence[tuple[int, float]]], *, title: str
) -> None:
    """Draw the training ``(step, mean reward)`` and, by set, held-out ``(step, success rate)`` into a PNG,
    atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if rewards:
        axes.plot([s for s, _ in rewards], [r for _, r in rewards], linewidth=1.5, label="training reward")
    for name, points in held_out.items():
        label = f"held-out success ({name})"
        axes.plot([s for s, _ in points], [r for _, r in points], marker="o", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="rollout", ylabel="reward, success rate", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="best")
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png")
