"""Half a run: rollouts without a trainer, and a trainer without engines on rollouts that were stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.config.schema import Config, TrainerOptions
from agentrl.data.account import TaskAccount
from agentrl.data.store import TrajectoryStore
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.orchestrator import launch as driver
from agentrl.orchestrator.cluster import bundles_of
from agentrl.orchestrator.dry_run import dry_run
from agentrl.orchestrator.handles import RolloutHandle, TrainerHandle
from agentrl.orchestrator.manager import Generated
from agentrl.orchestrator.stored import StoredRollouts
from agentrl.tasks.source import TaskSource
from agentrl.trainer.ranks import TrainActor
from agentrl.types import Group, Segment, StopReason, Task, Trajectory
from tests.orchestrator.scripted import leave_out_processes
from tests.orchestrator.test_manager import made
from tests.orchestrator.test_train_step import InProcess, Rank
from tests.trainer.samples import VOCAB, tiny_checkpoint


def segment(rng: np.random.Generator) -> Segment:
    mask = (rng.random(int(rng.integers(8, 30))) < 0.6).astype(np.uint8)
    mask[:2], mask[2] = 0, 1
    tokens, logprobs = rng.integers(0, VOCAB, len(mask)), -rng.exponential(1.0, len(mask)) * mask
    versions = np.where(mask, 0, -1)
    return Segment(tokens.astype(np.int32), mask, logprobs.astype(np.float32), versions.astype(np.int32), 2)


async def play(task: Task, n: int, group_id: str, *, on_trajectory: Any) -> Group:
    """Episodes of random tokens, all that may happen to one among them: lost, cut short, of two segments or agents."""
    parts, number = [], int(group_id[1:])
    for index in range(n):
        rng = np.random.default_rng([number, index])
        several, reasons = number % 5 == 3, [StopReason.DONE, StopReason.MAX_TURNS]
        for agent in ("giver", "taker") if several else ("agent",):
            name = f"{group_id}-{index:03d}"
            reason = StopReason.ENV_ERROR if (number, index) == (1, 2) else reasons[index % 2]
            part = Trajectory(
                f"{name}:{agent}" if several else name, f"{group_id}/{agent}" if several else group_id, task,
                [segment(rng) for _ in range(1 + index % 2)], [],
                reward=0.0 if number % 4 == 2 else float(rng.random()),
                stop_reason=reason, agent=agent, info={"episode_id": name} if several else {},
            )  # fmt: skip
            part.turn_rewards = [part.reward]
            parts.append(part)
    return Group(group_id, task, parts)


class Played(RolloutHandle):
    """The rollout manager in this process, over episodes that need no engine."""

    def __init__(self, manager: Any):
        super().__init__(manager, deadline=100.0, rollout_deadline=100.0)

    async def start(self) -> list[str]:
        return []

    async def generate(self, step: int, *, progress: Any) -> Generated | None:
        return await self.manager.generate(step)

    async def mark_trained(self, columns: Any) -> None:
        await self.manager.mark_trained(columns)

    async def update_weights(self, snapshot: Any) -> dict[str, float]:
        return {}

    async def state(self, folder: Path) -> dict[str, Any]:
        return await self.manager.state(str(folder))

    async def close(self, seconds: float) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def train() -> Iterator[Callable[..., Path]]:
    """``train(*flags)`` is ``agentrl train`` with one real rank in this process, the manager in it, and no engine."""
    import ray

    monkeypatch, actors = pytest.MonkeyPatch(), list[TrainActor]()

    class Trainer(InProcess):
        async def begin(self) -> None:
            actors[-1].start(actors[-1].meeting_point())

        async def publish(self, version: int) -> Any: ...

    def start_trainer(cfg: Config, *_: Any) -> TrainerHandle:
        if not cfg.trains:
            return TrainerHandle([], num_steps=1, deadline=1.0)
        actors.append(TrainActor(0, 1, str(cfg.hf_checkpoint), cfg.section(TrainerOptions).replace(threads=1)))
        return Trainer([Rank(actors[-1])], num_steps=cfg.num_steps_per_rollout or 1, deadline=100.0)

    def start_actors(cfg: Config, cluster: Any, run: Any, weights_dir: str) -> tuple[TrainerHandle, RolloutHandle]:
        assert cfg.plays, "nothing is played on stored rollouts"
        manager = made(run.path, monkeypatch)
        manager.cfg = cfg
        manager._put_together(TaskAccount(TaskSource("search", 100)), SimpleNamespace(run_group=play), [])
        return start_trainer(cfg), Played(manager)

    leave_out_processes(monkeypatch)
    monkeypatch.setattr(driver, "check_environment", lambda cfg: None)
    monkeypatch.setattr(driver, "start_actors", start_actors)
    monkeypatch.setattr(driver, "start_trainer", start_trainer)
    monkeypatch.setattr(ray, "put", lambda value: value)

    def call(*flags: str) -> Path:
        cfg = load_config(flags)
        assert driver.train(cfg) == 0
        while actors:
            actors.pop().close()
        return Path(str(cfg.output_dir))

    yield call
    monkeypatch.undo()
    for actor in actors:
        actor.close()


SIZES = ("--rollout-batch-size", "3", "--n-samples-per-prompt", "4", "--num-rollout", "3", "--no-tensorboard",
         "--dynamic-sampling-filter-path", "reward_variance", "--over-sampling-batch-size", "4")  # fmt: skip
FLAGS = (*SIZES, "--num-steps-per-rollout", "2", "--lr", "1e-3", "--lr-decay-style", "linear", "--save-interval", "1",
         "--keep-last", "0", "--rollout-max-context-len", "1000", "--rollout-max-response-len", "99",
         "--logprob-abs-diff-stop", "0", "--no-use-rollout-logprobs", "--use-tis")  # fmt: skip


@pytest.fixture(scope="module")
def whole(model: str) -> tuple[str, ...]:
    return ("--env", "search", "--hf-checkpoint", model, *FLAGS)


@pytest.fixture(scope="module")
def run(train: Any, whole: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rollouts, with a checkpoint after each."""
    return train(*whole, "--output-dir", str(tmp_path_factory.mktemp("whole") / "run"))


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / "hf" / "model.safetensors").read_bytes()


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: Path) -> list[dict[str, float]]:
    """What is logged of each step's training, but how long it took."""
    return [{k: v for k, v in line.items() if k.startswith("train/") and "per_s" not in k} for line in logged(run)]


def trained_with(run: Path) -> list[tuple[str, float | None, list[np.ndarray]]]:
    store = TrajectoryStore(run / "trajectories", read_only=True)
    return [
        (t.trajectory_id, t.advantage, [s.trained["old"] for s in t.segments])
        for t in store.read("train")
        if t.advantage is not None
    ]


def test_stored_rollouts_give_the_same_weights_bit_for_bit(
    train: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = train("--load-debug-rollout-data", str(run), "--output-dir", str(tmp_path / "again"))
    for step in (1, 2, 3):
        assert weights(again, step) == weights(run, step)
    assert weights(run, 3) != weights(run, 2)
    assert figures(again) == figures(run)
    assert "rollout/tokens_per_s" not in logged(again)[0]
    for one, other in zip(trained_with(run), trained_with(again), strict=True):
        assert one[:2] == other[:2] and all(map(np.array_equal, one[2], other[2]))
    # From a checkpoint on the way, of the rollouts that were trained again.
    half = train("--load", f"{run}/checkpoints/step_000002", "--load-debug-rollout-data", f"{again}/trajectories",
                 "--output-dir", str(tmp_path / "half"))  # fmt: skip
    assert weights(half, 3) == weights(run, 3)
    # It goes on as any run does, here to the end of what is stored.
    assert train("--load", str(half), "--num-rollout", "4") == half
    assert f"no more rollouts in {again}/trajectories: done after 3 of 4" in capsys.readouterr().out.replace("\n", "")
    assert [line["step"] for line in logged(half)] == [3]


def test_rollouts_alone_are_played_stored_and_logged_and_can_be_trained_on_later(
    train: Any, run: Path, whole: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = train(*whole, "--debug-rollout-only", "--output-dir", str(tmp_path / "played"))
    assert f"agentrl train --load-debug-rollout-data {played}" in capsys.readouterr().out.replace("\n", "")
    assert [line["step"] for line in logged(played)] == [1, 2, 3] and not (played / "checkpoints").exists()
    assert not [name for line in logged(played) for name in line if name.startswith("train/")]
    store = TrajectoryStore(played / "trajectories", read_only=True)
    assert {t.advantage for t in store.read("train")} == {None}
    assert [part.step for part in store.parts("train")] == [0, 1, 2]
    later = train("--load-debug-rollout-data", str(played), "--output-dir", str(tmp_path / "later"))
    assert weights(later, 3) == weights(run, 3)


async def test_a_run_that_began_later_or_ends_early_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    cfg = load_config(["--load-debug-rollout-data", str(tmp_path), *SIZES])
    with pytest.raises(DataError, match="no stored rollout .* Give a run folder"):
        StoredRollouts(cfg)
    store.write(2, (await play(Task("t", 0), 4, "g00000000", on_trajectory=None)).trajectories)
    stored = StoredRollouts(cfg)
    with pytest.raises(DataError, match="rollout 0 is not stored, there are 2.*--load RUN/checkpoints/step_N"):
        await stored.generate(0, progress=None)
    assert await stored.generate(3, progress=None) is None


def test_the_options_are_those_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    whole = load_config(["--env", "search", *SIZES, "--eval-interval", "2", "--best-metric", "eval/search/success"])
    (run / "config.json").write_text(json.dumps(whole.to_dict()))
    cfg = load_config(["--load-debug-rollout-data", str(run), "--lr", "0.5"])
    assert (cfg.env, cfg.rollout_batch_size, cfg.lr, cfg.eval_interval, cfg.best_metric) == ("search", 3, 0.5, 0, None)
    assert cfg.debug_train_only and not cfg.plays and cfg.trains and cfg.output_dir is None
    assert [bundle.name for bundle in bundles_of(cfg, World())] == ["rank-0"]
    cfg = load_config(["--env", "search", "--debug-rollout-only"])
    assert cfg.plays and not cfg.trains and cfg.eval_interval == 0
    assert [bundle.name for bundle in bundles_of(cfg, World())] == ["engine-0", "rollout-manager"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--debug-train-only",), "--debug-train-only needs --load-debug-rollout-data RUN"),
        (("--load-debug-rollout-data", "RUN", "--eval-interval", "2"), "--eval-interval 2: .* no engine runs"),
        (("--load-debug-rollout-data", "RUN", "--output-dir", "RUN"), "holds the rollouts .* give another folder"),
        (("--load-debug-rollout-data", "RUN", "--debug-rollout-only"), "exclude each other"),
        (("--load-debug-rollout-data", "RUN", "--loss-type", "sft_loss", "--sft-from", "RUN"), "--sft-from RUN learns"),
        (("--debug-rollout-only", "--eval-interval", "2"), "--eval-interval 2: .* agentrl eval evaluates it"),
        (("--debug-rollout-only", "--save-hf", "x"), "--save-hf x: .* nothing to save"),
        (("--debug-rollout-only", "--save", "x"), "--save x: .* nothing to save"),
        (("--debug-rollout-only", "--auto-resume"), "--auto-resume: .* nothing to go on from"),
        (("--debug-rollout-only", "--max-staleness", "3"), "--max-staleness 3: .* do not grow old"),
    ],
)
def test_what_half_a_run_cannot_give_is_refused(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    (tmp_path / "RUN" / "trajectories").mkdir(parents=True)
    given = [flag.replace("RUN", str(tmp_path / "RUN")) for flag in flags]
    env = () if "sft_loss" in flags else ("--env", "search")
    with pytest.raises(ConfigError, match=words.replace("RUN learns", ".* learns")):
        load_config([*env, *given])


def test_nothing_can_be_gone_on_with_where_nothing_was_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_config(["--env", "search"]).to_dict()))
    with pytest.raises(ConfigError, match="--load .*nothing is trained.* give --hf-checkpoint its folder hf"):
        load_config(["--load", str(tmp_path), "--debug-rollout-only"])


def test_a_dry_run_says_which_half_would_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    store.write(0, [Trajectory("e", "g", Task("t", 0), [], [])])
    dry_run(load_config(["--load-debug-rollout-data", str(tmp_path), "--output-dir", str(tmp_path / "new")]))
    said = capsys.readouterr().out
    assert "trainer" in said and "rollout manager" not in said and "snapshot" not in said and str(tmp_path) in said
    dry_run(load_config(["--env", "search", "--debug-rollout-only", "--output-dir", str(tmp_path / "new")]))
    said = capsys.readouterr().out
    assert "rollout manager" in said and "trainer" not in said and "checkpoints" not in said


async def test_a_checkpoint_of_stored_rollouts_has_no_place_in_the_tasks(tmp_path: Path, monkeypatch: Any) -> None:
    TrajectoryStore(tmp_path / "trajectories").write(0, [Trajectory("e", "g", Task("t", 0), [], [])])
    state = await StoredRollouts(load_config(["--load-debug-rollout-data", str(tmp_path)])).state(tmp_path)
    with pytest.raises(AgentRLError, match="--load-debug-rollout-data, which has no place in the tasks"):
        await made(tmp_path, monkeypatch).load_state(state, str(tmp_path))
