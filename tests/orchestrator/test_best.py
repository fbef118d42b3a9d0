"""The best checkpoint: which it is, that it is kept, and that it stays right whatever happens to the run."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.config import Config, load_config
from agentrl.data.checkpoint import Best, CheckpointStore
from agentrl.data.export import export
from agentrl.data.run_folder import RunDir
from agentrl.engines.world import World
from agentrl.errors import CheckpointError, ConfigError, EnvError
from agentrl.evaluation.metrics import summarize
from agentrl.orchestrator.launch import check_environment
from agentrl.orchestrator.loop import training_loop
from agentrl.orchestrator.manager import Generated
from agentrl.progress import Progress
from agentrl.types import Task, Trajectory
from tests.orchestrator import scripted


class Trainer(scripted.Trainer):
    async def save(self, path: Path, *, later: bool = False) -> None:
        path.mkdir()

    async def save_hf(self, path: Path, *, later: bool = False) -> None:
        path.mkdir()
        (path / "config.json").write_text(path.parent.name)

    async def load(self, path: Path) -> None: ...


class Rollout:
    """Solves ``solved[version]`` of ten held-out tasks; None: its evaluation has no score."""

    def __init__(self, solved: dict[int, int | None]) -> None:
        self.solved = solved
        self.evaluated: list[int] = []

    async def update_weights(self, snapshot: Any) -> dict[str, float]:
        return {}

    async def generate(self, step: int, *, progress: Any) -> Any:
        names = ("rollout/reward", "rollout/success", "rollout/turns", "rollout/tokens_per_s")
        return Generated({**dict.fromkeys(names, 0.0)}, [])

    async def mark_trained(self, columns: Any) -> None: ...

    async def state(self, folder: Path) -> dict[str, Any]:
        return {}

    async def evaluate(self, step: int, *, progress: Any) -> dict[str, Any]:
        self.evaluated.append(step)
        solved = self.solved[step]
        count = 0 if solved is None else 10
        episodes = [
            Trajectory(f"t{i}", f"g{i}", Task(f"t{i}", i), [], [], success=i < (solved or 0)) for i in range(count)
        ]
        return {"search": summarize("search", "test", episodes, 1.0).to_dict()}


async def train(cfg: Config, rollout: Rollout, run: RunDir, start: int = 0) -> CheckpointStore:
    checkpoints = CheckpointStore(run.checkpoints, keep_last=cfg.keep_last, async_save=cfg.async_save)
    await training_loop(
        cfg, start=start, trainer=Trainer(), rollout=rollout, checkpoints=checkpoints, run=run,
        progress=Progress("x", cfg.num_rollout, console=Console(file=io.StringIO())), world=World(),
    )  # fmt: skip
    return checkpoints


@pytest.fixture
def configure(tmp_path: Path) -> Any:
    def make(*flags: str) -> Config:
        return load_config(
            ["--env", "search", "--output-dir", str(tmp_path / "run"), "--no-tensorboard", "--num-rollout", "6",
             "--eval-interval", "1", "--save-interval", "2", "--keep-last", "2", "--best-metric", "eval/search/success",
             *flags]
        )  # fmt: skip

    return make


async def test_the_best_is_kept_beside_the_newest(configure: Any, tmp_path: Path) -> None:
    cfg = configure()
    with RunDir.create(cfg) as run:
        store = await train(cfg, Rollout({0: 9, 1: 3, 2: 7, 3: 7, 4: None, 5: 2, 6: 5}), run)
    assert store.best_so_far() == Best(2, "eval/search/success", 0.7), "the earlier of two equals; no untrained one"
    assert store.steps() == [2, 5, 6] and store.newest().step == 6
    folder = tmp_path / "run"
    assert CheckpointStore.open_run(folder, which="best").step == 2
    assert CheckpointStore.open_run(folder, which="5").step == 5
    exported = export(folder, tmp_path / "model", checkpoint="best")
    assert (exported / "config.json").read_text() == "step_000002.tmp"


async def test_without_a_metric_nothing_is_the_best(configure: Any, tmp_path: Path) -> None:
    cfg = configure().replace(best_metric=None)
    with RunDir.create(cfg) as run:
        store = await train(cfg, Rollout(dict.fromkeys(range(7), 3)), run)
    assert store.best_so_far() is None and store.steps() == [4, 6]
    with pytest.raises(CheckpointError, match="trained without --best-metric"):
        CheckpointStore.open_run(tmp_path / "run", which="best")
    with pytest.raises(CheckpointError, match="step_000003.*no such folder"):
        CheckpointStore.open_run(tmp_path / "run", which="3")


async def test_it_survives_an_interruption_between_evaluation_and_mark(configure: Any) -> None:
    cfg = configure("--num-rollout", "3")
    with RunDir.create(cfg) as run:
        store = await train(cfg, Rollout({0: 1, 1: 2, 2: 3, 3: 8}), run)
        store.mark_best(Best(2, "eval/search/success", 0.3))  # as if it had been killed before the last mark
    cfg = cfg.replace(num_rollout=4, output_dir=str(run.path))
    with RunDir.resume(cfg) as run:
        run.go_on(3)
        store = await train(cfg, Rollout({4: 5}), run, start=3)
    assert store.best_so_far() == Best(3, "eval/search/success", 0.8)


async def test_going_back_forgets_what_came_after(configure: Any) -> None:
    cfg = configure("--keep-last", "0")
    with RunDir.create(cfg) as run:
        store = await train(cfg, Rollout({0: 1, 1: 2, 2: 6, 3: 3, 4: 9, 5: 4, 6: 4}), run)
        assert store.best_so_far().step == 4
    cfg = cfg.replace(output_dir=str(run.path), num_rollout=4)
    with RunDir.resume(cfg) as run:
        run.go_on(3)
        store.go_on_from(3)
        rollout = Rollout({4: 1})
        store = await train(cfg, rollout, run, start=3)
    assert rollout.evaluated == [4] and store.best_so_far() == Best(2, "eval/search/success", 0.6)


def test_an_unknown_metric_ends_it_before_anything_starts(configure: Any) -> None:
    check_environment(configure())
    for metric in ("eval/serach/success", "eval/search/tokens", "rollout/reward"):
        with pytest.raises(ConfigError, match=f"--best-metric {metric}.*eval/search/success, eval/search/reward"):
            check_environment(configure("--best-metric", metric))
    with pytest.raises(ConfigError, match="--best-metric has no effect without --eval-interval"):
        configure("--eval-interval", "0")


def test_a_held_out_set_that_cannot_be_played_ends_it_before_anything_starts(configure: Any, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import agentrl\n\n\nclass Other(agentrl.ToolEnv):\n    tasks = {'train': ['a'], 'test': ['b', 'c']}\n\n"
        "    def reward(self, text, answer):\n        return {}['colour']\n"
    )
    with pytest.raises(EnvError, match=r"KeyError: 'colour' \(other.py:8 in reward"):
        check_environment(configure("--eval-env", f"{tmp_path}/other.py:Other"))


def test_a_damaged_pointer_is_named_and_mended(tmp_path: Path) -> None:
    (tmp_path / "best").write_text('{"step": 1}')
    store = CheckpointStore(tmp_path)
    assert store.best_so_far() is None
    with pytest.raises(CheckpointError, match="best cannot be read.*--load mends it"):
        store.best()
    assert math.isnan(summarize("x", "test", [], 1.0).success.mean)
