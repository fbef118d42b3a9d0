"""Supervised fine-tuning by the command, with a real trainer in this process; and what its batches are made of."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.config.schema import Config, TrainerOptions
from agentrl.data.checkpoint import CheckpointStore
from agentrl.data.store import TrajectoryStore
from agentrl.engines.world import World
from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.orchestrator import launch as driver
from agentrl.orchestrator.cluster import bundles_of
from agentrl.orchestrator.dry_run import dry_run
from agentrl.orchestrator.supervised import HELD_OUT, HeldOut, StoredTrajectories, SupervisedData, WrittenChats
from agentrl.processes.signals import Terminated
from agentrl.trainer.ranks import TrainActor
from agentrl.types import Segment, StopReason, Task, Trajectory
from tests.orchestrator.scripted import leave_out_processes
from tests.orchestrator.test_train_step import InProcess, Rank
from tests.rollout.family_cases import checkpoint
from tests.trainer.samples import tiny_checkpoint

CHATS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny random model with the tokenizer of the Qwen2.5 of the tests."""
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder)
    return str(checkpoint("qwen2.5", folder))


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n * n}."}]}
        for n in range(CHATS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def config(model: str, *flags: str) -> Config:
    short = ("--rollout-max-context-len", "1000")
    return load_config(["--loss-type", "sft_loss", "--hf-checkpoint", model, *short, *flags])


@pytest.fixture
def train(monkeypatch, model, chats):
    """``train(*flags)`` is ``agentrl train --loss-type sft_loss`` with one rank in this process, and no Ray; with
    ``kill=n`` the rank is lost in its n-th step."""
    import ray

    ranks: list[TrainActor] = []

    class Trainer(InProcess):
        kill = 0

        async def begin(self) -> None:
            ranks[-1].start(ranks[-1].meeting_point())

        async def update(self, *args: Any, **how: Any) -> Any:
            Trainer.kill -= 1
            if Trainer.kill == 0:
                raise AgentRLError("a rank is gone")
            return await super().update(*args, **how)

    def start_trainer(cfg: Config, *_: Any) -> InProcess:
        ranks.append(TrainActor(0, 1, str(cfg.hf_checkpoint), cfg.section(TrainerOptions).replace(threads=1)))
        return Trainer([Rank(ranks[0])], num_steps=cfg.num_steps_per_rollout, deadline=100.0)

    leave_out_processes(monkeypatch)
    monkeypatch.setattr(driver, "start_trainer", start_trainer)
    monkeypatch.setattr(ray, "put", lambda value: value)

    def call(*flags: str, kill: int = 0) -> Path:
        Trainer.kill = kill
        try:
            cfg = load_config(flags) if "--load" in flags else config(model, "--train-data", chats, *flags)
            driver.train(cfg)
            return Path(str(cfg.output_dir))
        finally:
            ranks.pop().close()

    return call


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / "hf" / "model.safetensors").read_bytes()


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


FLAGS = ("--rollout-batch-size", "4", "--num-rollout", "4", "--save-interval", "2", "--lr", "1e-3", "--keep-last", "0",
         "--num-steps-per-rollout", "2", "--no-tensorboard", "--deterministic")  # fmt: skip


def held_out(run: Path) -> dict[int, float]:
    return {line["step"]: line[HELD_OUT] for line in logged(run) if HELD_OUT in line}


def steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in logged(run) if HELD_OUT not in line]


def test_a_run_that_was_killed_goes_on_to_the_same_weights(train, chats, tmp_path, capsys):
    flags = (*FLAGS, "--eval-data", chats, "--eval-interval", "1")
    straight = train(*flags, "--output-dir", str(tmp_path / "straight"))
    lines = steps(straight)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert lines[-1]["data/epoch"] == 4 * 4 / CHATS and lines[-1]["data/trained"] == 16
    assert {line["train/steps"] for line in lines} == {2}
    assert "agentrl eval --run" in capsys.readouterr().out
    broken = tmp_path / "broken"
    with pytest.raises(AgentRLError, match="a rank is gone"):
        train(*flags, "--output-dir", str(broken), kill=4)
    assert [line["step"] for line in steps(broken)] == [1, 2, 3]
    train("--load", str(broken))
    same = ("step", "train/loss", "train/grad_norm", "train/tokens", "data/epoch", "data/issued", "data/trained")
    assert [[line[k] for k in same] for line in steps(broken)] == [[line[k] for k in same] for line in lines]
    assert held_out(broken) == held_out(straight) and list(held_out(straight)) == [0, 1, 2, 3, 4]
    assert len([line for line in logged(broken) if HELD_OUT in line]) == 5
    assert weights(broken, 4) == weights(straight, 4) != weights(straight, 2)


def test_a_run_that_is_asked_to_end_saves_what_it_learned(train, tmp_path, monkeypatch):
    flags = (*FLAGS[:4], "--save-interval", "9", *FLAGS[6:])
    straight, asked = train(*flags, "--output-dir", str(tmp_path / "straight")), tmp_path / "asked"
    draw, drawn = SupervisedData.next_batch, []

    def end(self: SupervisedData) -> Any:
        drawn.append(draw(self))
        if len(drawn) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 20
            while not CheckpointStore(asked / "checkpoints").steps() and time.monotonic() < deadline:
                time.sleep(0.01)  # its batch is not there before the run was cancelled
        return drawn[-1]

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedData, "next_batch", end)
        with pytest.raises(Terminated):
            train(*flags, "--output-dir", str(asked))
    assert CheckpointStore(asked / "checkpoints").steps() == [3]
    train("--load", str(asked))
    assert [line["step"] for line in steps(asked)] == [1, 2, 3, 4] and steps(asked)[-1]["data/trained"] == 16
    assert weights(asked, 4) == weights(straight, 4)


def test_the_held_out_loss_is_the_training_loss_of_the_same_conversations(train, chats, tmp_path, capsys):
    whole = ("--rollout-batch-size", str(CHATS), "--num-rollout", "1", "--save-interval", "1")
    short = ("--lr", "1e-3", "--no-tensorboard", "--eval-data", chats, "--eval-interval", "1")
    run = train(*whole, *short, "--output-dir", str(tmp_path / "run"))
    before, after = held_out(run).values()
    assert before == pytest.approx(steps(run)[0]["train/loss"], rel=1e-5) and after < before
    assert f"held-out loss {before:.4f}, {after:.4f} after 1 step\n" in capsys.readouterr().out
    assert CheckpointStore(run / "checkpoints").newest().step == 1


def test_held_out_conversations_that_are_too_long_are_named(model, chats):
    examples = WrittenChats(config(model, "--train-data", chats), chats)
    lengths = sorted(len(examples.segments(n)[0]) for n in range(CHATS))
    held_out = HeldOut(examples, lengths[-1] - 1)
    assert len(held_out.batch) < CHATS and "are left out" in str(held_out.left_out)
    with pytest.raises(DataError, match="all 10 conversations of --eval-data"):
        HeldOut(examples, 3)


def test_a_bad_row_or_template_ends_it_before_anything_starts(model, tmp_path, monkeypatch):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DataError, match=r"chats.jsonl:1: no message is the assistant's"):
        driver.train(config(model, "--train-data", str(file), "--output-dir", str(tmp_path / "run")))
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('never') }}")
    file.write_text('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n')
    flags = ("--train-data", str(file), "--chat-template", str(template), "--output-dir", str(tmp_path / "run"))
    with pytest.raises(AgentRLError, match="never"):
        driver.train(config(model, *flags))
    with pytest.raises(DataError, match=r"bad.jsonl:1: expected a list 'messages'"):
        (tmp_path / "bad.jsonl").write_text("{}\n")
        held_out = ("--eval-data", str(tmp_path / "bad.jsonl"), "--eval-interval", "1")
        driver.train(config(model, "--train-data", str(file), *held_out, "--output-dir", str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_no_engine_and_no_manager_are_placed(model, chats):
    cfg = config(model, "--train-data", chats, "--actor-num-gpus-per-node", "2")
    assert [bundle.name for bundle in bundles_of(cfg, World())] == ["rank-0", "rank-1"]


def test_a_dry_run_reads_the_data_and_names_no_engine(model, chats, tmp_path, capsys):
    dry_run(config(model, "--train-data", chats, "--output-dir", str(tmp_path / "run")))
    told = capsys.readouterr().out
    assert "Every check passed" in told and chats in told and "32 tasks × 1 episodes = 32" in told
    assert "engine" not in told and "router" not in told and not (tmp_path / "run").exists()


# -- batches -----------------------------------------------------------------------------------------------


def test_each_example_comes_once_an_epoch_in_an_order_of_the_seed(model, chats):
    examples = WrittenChats(config(model, "--train-data", chats), chats)

    def drawn(seed: int) -> list[bytes]:
        data, found = SupervisedData(examples, size=4, seed=seed, longest=1000), []
        for _ in range(5):
            batch, _ = data.next_batch()
            found += [tokens.tobytes() for tokens in np.split(batch.tokens, batch.offsets[1:-1])]
            data.mark_trained()
        return found

    first = drawn(0)
    assert len(set(first[:CHATS])) == len(set(first[CHATS:])) == CHATS
    assert first[:CHATS] != first[CHATS:] and first == drawn(0) != drawn(1)


def test_examples_that_are_too_long_are_left_out_and_named(model, chats):
    examples = WrittenChats(config(model, "--train-data", chats), chats)
    lengths = sorted(len(examples.segments(n)[0]) for n in range(CHATS))
    data = SupervisedData(examples, size=CHATS, seed=0, longest=lengths[-1] - 1)
    batch, said = data.next_batch()
    assert len(batch) == CHATS and batch.lengths.max() < lengths[-1] and data.mark_trained()["data/dropped"] > 0
    assert "have more tokens than --rollout-max-context-len" in said
    with pytest.raises(DataError, match="all 10 examples are longer than --rollout-max-context-len 3"):
        SupervisedData(examples, size=2, seed=0, longest=3).next_batch()


async def test_a_checkpoint_of_other_examples_is_refused(model, chats, tmp_path):
    examples = WrittenChats(config(model, "--train-data", chats), chats)
    state = await SupervisedData(examples, size=2, seed=0, longest=100).state(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(Path(chats).read_text().replace("It is 4.", "It is 5."))
    changed = SupervisedData(
        WrittenChats(config(model, "--train-data", str(other)), str(other)), size=2, seed=0, longest=100
    )
    with pytest.raises(DataError, match="made with other examples"):
        await changed.load_state(state, tmp_path)


# -- stored trajectories -----------------------------------------------------------------------------------


def episode(name: str, reward: float, success: bool | None, **how: Any) -> Trajectory:
    tokens = np.arange(5, dtype=np.int32) + 10 * len(name)
    mask = np.array([0, 0, 1, 0, 1], np.uint8)
    segment = Segment(tokens, mask, -0.5 * mask.astype(np.float32), np.where(mask, 3, -1).astype(np.int32), 2)
    return Trajectory(name, "g", Task("t", 0), [segment], [], reward=reward, success=success, **how)


@pytest.fixture
def run(tmp_path, model):
    """A run with stored episodes; ``a`` and ``ccc`` succeeded, ``bb`` did not, ``dddd`` was an error."""
    store = TrajectoryStore(tmp_path / "run" / "trajectories")
    store.write(0, [episode("a", 1.0, True), episode("bb", 0.4, False)])
    failed = episode("dddd", 1.0, True, stop_reason=StopReason.ENV_ERROR)
    store.write(1, [episode("ccc", 0.7, None), failed])
    store.write(1, [episode("eeeee", 1.0, True)], name="eval-search")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"hf_checkpoint": model}))
    return tmp_path / "run"


def test_the_very_tokens_of_successful_episodes_are_learned(run, model):
    examples = StoredTrajectories(config(model, "--sft-from", str(run)))
    assert examples.ids == ["0/a", "1/ccc"]
    batch, _ = SupervisedData(examples, size=2, seed=0, longest=100).next_batch()
    assert sorted(batch.tokens.tolist()) == [10, 11, 12, 13, 14, 30, 31, 32, 33, 34]
    assert batch.loss_mask.tolist() == [0, 0, 1, 0, 1] * 2 and not batch.columns
    assert StoredTrajectories(config(model, "--sft-from", str(run), "--sft-min-reward", "0.4")).ids == [
        "0/a", "0/bb", "1/ccc"
    ]  # fmt: skip


def test_a_run_without_successes_or_of_another_tokenizer_is_refused(run, model, tmp_path):
    with pytest.raises(DataError, match="no stored episode of training earned --sft-min-reward 2; there are 3 that"):
        StoredTrajectories(config(model, "--sft-from", str(run), "--sft-min-reward", "2"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    (run / "config.json").write_text(json.dumps({"hf_checkpoint": str(other)}))
    with pytest.raises(ConfigError, match="another tokenizer.json: they would be other words"):
        StoredTrajectories(config(model, "--sft-from", str(run)))
